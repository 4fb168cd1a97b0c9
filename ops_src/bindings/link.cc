// The link of a host for its launcher.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include "base/error.h"
#include "collectives/hosts/link.h"

namespace py = pybind11;

namespace kungfu {
namespace {

using hosts::Link;

std::unique_ptr<Link> MakeLink(int local_fd, int board_fd, uint32_t host, const std::vector<uint32_t>& host_of_rank,
                               const std::vector<std::string>& addresses, const std::vector<std::string>& names,
                               const std::vector<std::vector<int>>& connections) {
  std::vector<tcp::HostEnds> ends;
  for (size_t h = 0; h < connections.size(); h++) ends.push_back({h < names.size() ? names[h] : "", connections[h]});
  std::shared_ptr<shm::Segment> local, everybody;
  std::optional<hosts::Places> places;
  try {
    local = std::make_shared<shm::Segment>(local_fd);
    everybody = std::make_shared<shm::Segment>(board_fd);
    places.emplace(host_of_rank);
    if (addresses.size() != host_of_rank.size() || names.size() != connections.size()) {
      throw Error(KF_INVALID, Text(addresses.size(), " addresses of ", host_of_rank.size(), " ranks, connections to ",
                                   connections.size(), " hosts with ", names.size(), " names"));
    }
  } catch (...) {
    for (const auto& to_host : connections) {
      for (const int fd : to_host) close(fd);
    }
    throw;
  }
  // Here alone, before anybody looks: what the ranks of other hosts are called.
  shm::Board board(everybody);
  for (uint32_t r = 0; r < addresses.size(); r++) board.Attach(r, addresses[r], false);
  return std::make_unique<Link>(local, everybody, *places, host, std::move(ends));
}

}  // namespace

void RegisterLink(py::module_& m) {
  py::class_<Link>(m, "Link", "A host's part in the collectives of one cluster version over several hosts.")
      .def(
          py::init(&MakeLink), py::arg("local_fd"), py::arg("board_fd"), py::arg("host"), py::arg("host_of_rank"),
          py::arg("addresses"), py::arg("names"), py::arg("connections"),
          "`local_fd`: a segment with a place for each rank of this host and one more; `board_fd`: one with all ranks. "
          "By rank: its host, its address; by host: its name, connected sockets to it (none for this one), which are "
          "taken over whatever happens.",
          py::call_guard<py::gil_scoped_release>())
      .def("connect", &Link::Connect, py::arg("local_rank"),
           "A socket for the process that is this rank of the local segment; the caller passes it on and closes it.")
      .def("lose_host", &Link::LoseHost, py::arg("host"), py::call_guard<py::gil_scoped_release>(),
           "The members go on without this host, all of whose ranks are marked lost in the boards of all hosts. The "
           "links of all others are told of the same hosts in the same order.")
      .def("unreachable", &Link::Unreachable,
           "(host, why) of those to which a connection has ended; but for those that lose_host was told of.")
      .def("failure", &Link::failure, "Why it has failed, '' as long as it hasn't: a host that is lost, say.")
      .def(
          "fail", [](Link& link, const std::string& text) { link.Fail(KF_PEER_LOST, text); }, py::arg("text"),
          "Whatever is under way or begins, here or on the other hosts, raises PeerLostError with this text.",
          py::call_guard<py::gil_scoped_release>())
      .def("close", &Link::Close, py::call_guard<py::gil_scoped_release>(), "Ends it; idempotent.");
}

}  // namespace kungfu
