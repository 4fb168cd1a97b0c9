// Python bindings for the model store: ms_kungfu.comm.save, ms_kungfu.comm.request, and the
// functions that publish and find workers' stores.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/waiting.h"
#include "runtime/peer.h"

namespace py = pybind11;

namespace kungfu {

using store::PeerStore;

namespace {

kf_blob BlobOf(const py::buffer_info& info) {
  return {info.ptr, static_cast<uint64_t>(info.size) * static_cast<uint64_t>(info.itemsize)};
}

// Wraps a Python function so that any thread can call it. Its exceptions become Errors, because the
// caller may be a kernel.
template <typename Result, typename Argument>
std::function<Result(Argument)> FunctionFrom(const py::object& callable) {
  if (callable.is_none()) return nullptr;
  const std::shared_ptr<py::object> held(new py::object(callable), [](py::object* object) {
    if (Py_IsInitialized() == 0) return;
    py::gil_scoped_acquire acquire;
    delete object;
  });
  return [held](Argument argument) {
    py::gil_scoped_acquire acquire;
    try {
      return (*held)(argument).template cast<Result>();
    } catch (const py::error_already_set& raised) {
      throw Error(KF_INTERNAL, Text(std::string(py::str(raised.type().attr("__name__"))), ": ",
                                    std::string(py::str(raised.value()))));
    }
  };
}

}  // namespace

void RegisterStore(py::module_& m) {
  m.def(
      "set_store_handlers",
      [](const py::object& announce, const py::object& find) {
        const auto tell = FunctionFrom<std::string, int>(announce);
        PeerStore::Announce told;
        if (tell) {
          told = [tell](int fd) {
            const std::string refusal = tell(fd);
            if (!refusal.empty()) throw Error(KF_PEER_LOST, refusal);
          };
        }
        Peer::Get().store().SetHandlers(std::move(told), FunctionFrom<int, uint32_t>(find));
      },
      py::arg("announce"), py::arg("find"),
      "Set two functions: `announce` publishes the descriptor of this process's store, and returns '' or the "
      "reason for a rejection; `find` returns the descriptor of a rank's store, or -1. The runtime closes this "
      "descriptor.");
  m.def(
      "reset_store",
      [] {
        py::gil_scoped_release release;
        Peer::Get().store().Reset();
      },
      "Forget all saved models and the stores of other ranks.");
  m.def(
      "save",
      [](const std::string& name, const std::string& layout, const py::buffer& buffer) {
        const py::buffer_info info = buffer.request();
        const kf_blob blob = BlobOf(info);
        py::gil_scoped_release release;
        return Peer::Get().store().Save(name, layout, &blob, 1);
      },
      py::arg("name"), py::arg("layout"), py::arg("buffer"));
  m.def(
      "describe_saved",
      [](uint32_t rank, const std::string& name) {
        store::Description description;
        Waiting([&] { description = Peer::Get().store().Describe(rank, name); });
        return std::make_tuple(description.layout, description.bytes, description.version);
      },
      py::arg("rank"), py::arg("name"),
      "Return (layout, bytes, latest version); version 0 means that nothing was saved.");
  m.def(
      "request",
      [](uint32_t rank, const std::string& name, const std::string& layout, const py::buffer& buffer) {
        const py::buffer_info info = buffer.request(/*writable=*/true);
        const kf_blob blob = BlobOf(info);
        uint64_t version = 0;
        Waiting([&] { version = Peer::Get().store().Request(rank, name, layout, &blob, 1); });
        return version;
      },
      py::arg("rank"), py::arg("name"), py::arg("layout"), py::arg("buffer"));
}

}  // namespace kungfu
