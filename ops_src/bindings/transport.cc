// Python bindings for the transports that a launcher runs for the workers on its host.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <map>
#include <memory>

#include "base/error.h"
#include "collectives/hosts/transport.h"
#include "store/model_transport.h"

namespace py = pybind11;

namespace kungfu {
namespace {

using hosts::Transport;
using store::ModelTransport;
using store::StoreView;

using TlsEnds = std::map<int, std::shared_ptr<tcp::TlsEnd>>;

// Connected sockets to the other hosts. The object owns the sockets until they are taken from it.
class Connections {
 public:
  Connections(const std::vector<std::string>& names, const std::vector<std::vector<int>>& connections)
      : names_(names), connections_(connections) {}
  ~Connections() {
    for (const auto& to_host : connections_) {
      for (const int fd : to_host) close(fd);
    }
  }
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  size_t size() const { return connections_.size(); }
  std::vector<tcp::HostEnds> Take(const TlsEnds& tls) {
    std::vector<tcp::HostEnds> ends;
    for (size_t h = 0; h < size(); h++) ends.push_back({h < names_.size() ? names_[h] : "", connections_[h], tls});
    connections_.clear();
    return ends;
  }

 private:
  const std::vector<std::string>& names_;
  std::vector<std::vector<int>> connections_;
};

// The two transports of one cluster version: one for collectives and one for models.
struct Transports {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<ModelTransport> models;

  std::pair<int, int> Connect(uint32_t local_rank) const {
    const int to_transport = transport->Connect(local_rank);
    try {
      return {to_transport, models->Connect()};
    } catch (...) {
      close(to_transport);
      throw;
    }
  }
  void LoseHost(uint32_t host) const {
    transport->LoseHost(host);
    models->LoseHost(host);
  }
  std::vector<std::pair<uint32_t, std::string>> Unreachable() const {
    auto found = transport->Unreachable();
    const auto also = models->Unreachable();
    found.insert(found.end(), also.begin(), also.end());
    return found;
  }
  void Close() const {
    transport->Close();
    models->Close();
  }
};

// Wraps `find` for the transport's thread, which doesn't hold the GIL. `find` itself acquires the
// GIL.
ModelTransport::Find FinderOf(std::function<int(uint32_t)> find) {
  return [find = std::move(find)](uint32_t rank) {
    try {
      return StoreView::Take(find(rank));
    } catch (const py::error_already_set& raised) {
      throw Error(KF_INTERNAL, Text("can't find the models of rank ", rank, ": ", raised.what()));
    }
  };
}

std::unique_ptr<Transports> MakeTransports(
    int local_fd, int control_fd, uint32_t host, const std::vector<uint32_t>& host_of_rank,
    const std::vector<std::string>& addresses, const std::vector<std::string>& names,
    const std::vector<std::vector<int>>& connections, const std::vector<std::vector<int>>& for_models,
    std::function<int(uint32_t)> find, const TlsEnds& tls, const std::string& strategy) {
  Connections own(names, connections), own_for_models(names, for_models);
  const auto local = std::make_shared<shm::Segment>(local_fd);
  const auto control_segment = std::make_shared<shm::Segment>(control_fd);
  const hosts::Places places(host_of_rank);
  const hosts::Strategy reduces_by = hosts::StrategyNamed(strategy);
  if (addresses.size() != host_of_rank.size() || names.size() != own.size() || names.size() != own_for_models.size()) {
    throw Error(KF_INVALID, Text(addresses.size(), " addresses for ", host_of_rank.size(), " ranks, connections to ",
                                 own.size(), " and ", own_for_models.size(), " hosts with ", names.size(), " names"));
  }
  // Only this code writes the addresses of ranks on other hosts. No reader exists yet.
  shm::SegmentControlBlock control(control_segment);
  for (uint32_t r = 0; r < addresses.size(); r++) control.Attach(r, addresses[r], false);
  auto finder = FinderOf(std::move(find));
  const py::gil_scoped_release release;
  auto transports = std::make_unique<Transports>();
  transports->transport = std::make_unique<Transport>(local, control_segment, places, host, own.Take(tls), reduces_by);
  transports->models = std::make_unique<ModelTransport>(places, host, own_for_models.Take(tls), std::move(finder));
  return transports;
}

}  // namespace

void RegisterTransport(py::module_& m) {
  py::class_<tcp::TlsContext, std::shared_ptr<tcp::TlsContext>>(m, "TlsContext", "A host's certificate and its CA.")
      .def(py::init<const std::string&, const std::string&, const std::string&>(), py::arg("certificate"),
           py::arg("key"), py::arg("ca"),
           "The arguments are PEM files. Raises ImportError if there is no OpenSSL, ValueError if a file is invalid.");
  py::class_<tcp::TlsEnd, std::shared_ptr<tcp::TlsEnd>>(
      m, "TlsEnd",
      "One end of a TLS connection. Its owner transfers the bytes until a transport takes over the connection.")
      .def(py::init<std::shared_ptr<tcp::TlsContext>, bool, const std::string&>(), py::arg("context"),
           py::arg("called"), py::arg("name"),
           "`called`: whether the other end opened the connection. `name`: the name that the other end's certificate "
           "must have; '' accepts any name.")
      .def(
          "put", [](tcp::TlsEnd& end, const std::string& bytes) { end.Put(bytes.data(), bytes.size()); },
          py::arg("bytes"), "Add bytes that have arrived from the network.")
      .def(
          "read",
          [](tcp::TlsEnd& end, size_t limit) {
            std::string bytes(limit, '\0');
            bytes.resize(end.Read(bytes.data(), limit));
            return py::bytes(bytes);
          },
          py::arg("limit"),
          "Return the decrypted bytes, or b'' if there are none yet. Continues the handshake. Raises ValueError with "
          "the reason if the other end has made an error.")
      .def_property_readonly("is_established", &tcp::TlsEnd::IsEstablished,
                             "Whether the handshake has ended. Write nothing before it has ended.")
      .def(
          "write", [](tcp::TlsEnd& end, const std::string& bytes) { end.Write(bytes.data(), bytes.size()); },
          py::arg("bytes"))
      .def(
          "take",
          [](tcp::TlsEnd& end) {
            const std::vector<char> bytes = end.Take();
            return py::bytes(bytes.data(), bytes.size());
          },
          "Return the bytes to send to the network. Call it after each read and write, even after one that raises.");
  py::class_<Transports>(m, "InterHostTransport",
                         "A host's contribution to the operations of one cluster version over several hosts.")
      .def(py::init(&MakeTransports), py::arg("local_fd"), py::arg("control_fd"), py::arg("host"),
           py::arg("host_of_rank"), py::arg("addresses"), py::arg("names"), py::arg("connections"),
           py::arg("for_models"), py::arg("find"), py::arg("tls"), py::arg("strategy"),
           "`local_fd`: a segment with one slot more than this host has ranks. `control_fd`: a segment with all ranks. "
           "`host_of_rank`, `addresses`: one item per rank. `names`, `connections`, `for_models`: one item per host; "
           "the last two hold connected sockets to the host (none for this host). The transport closes them, even on "
           "failure. `find`: returns the descriptor of a local rank's model store, which the transport closes, or -1. "
           "`tls`: the TLS end of each socket that uses TLS. `strategy`: KungFu's name of the strategy by which hosts "
           "reduce; the same on all hosts.")
      .def("connect", &Transports::Connect, py::arg("local_rank"),
           "Return two sockets for the process with this local rank: one to the transport for "
           "collectives, and one to the transport for models. The caller passes them to the process and then closes "
           "them.")
      .def("lose_host", &Transports::LoseHost, py::arg("host"), py::call_guard<py::gil_scoped_release>(),
           "Continue without this host. All its ranks must be marked lost in the control blocks of all hosts. The "
           "transports of all other hosts must be notified of the same hosts in the same order.")
      .def("unreachable", &Transports::Unreachable,
           "Return (host, reason) for each host to which a connection has ended, except hosts passed to lose_host.")
      .def(
          "failure", [](const Transports& transports) { return transports.transport->failure(); },
          "Return why the transport has failed (for example, a lost host), or ''.")
      .def(
          "fail",
          [](const Transports& transports, const std::string& text) { transports.transport->Fail(KF_PEER_LOST, text); },
          py::arg("text"), "Make all current and later operations, on all hosts, raise PeerLostError with this text.",
          py::call_guard<py::gil_scoped_release>())
      .def("close", &Transports::Close, py::call_guard<py::gil_scoped_release>(),
           "Close the transports. A second call does nothing.");
}

}  // namespace kungfu
