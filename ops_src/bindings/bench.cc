// Timing loops for `python -m benchmarks`. A call from Python takes as long as a small collective,
// so the loops and the clock are in C++. The runtime, an MPI library and memcpy are all measured in
// the same loop.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <climits>
#include <cstring>

#include "collectives/dtype.h"
#include "runtime/peer.h"

namespace py = pybind11;

namespace kungfu {
namespace {

// The tensors that one call uses.
using Set = std::vector<kf_tensor>;

// The sets of tensors. Successive calls use different sets, so that data can come from memory
// instead of the cache. The object keeps Python's buffers alive during a loop.
class Sets {
 public:
  using Buffers = std::vector<std::pair<std::vector<py::buffer>, std::vector<py::buffer>>>;

  Sets(const Buffers& sets, size_t unit) {
    for (const auto& [inputs, outputs] : sets) {
      if (inputs.size() != outputs.size())
        throw Error(KF_INVALID, Text(inputs.size(), " inputs but ", outputs.size(), " outputs"));
      Set set;
      for (size_t i = 0; i < inputs.size(); i++) {
        const py::buffer_info& in = held_.emplace_back(inputs[i].request());
        const void* input = in.ptr;
        const auto bytes = static_cast<size_t>(in.size * in.itemsize);
        const py::buffer_info& out = held_.emplace_back(outputs[i].request(/*writable=*/true));
        if (static_cast<size_t>(out.size * out.itemsize) != bytes)
          throw Error(KF_INVALID, "input and output differ in size");
        set.push_back({input, out.ptr, bytes / unit});
      }
      sets_.push_back(std::move(set));
    }
    if (sets_.empty()) throw Error(KF_INVALID, "no sets of buffers were given");
  }

  const Set& operator[](size_t i) const { return sets_[i % sets_.size()]; }

 private:
  std::vector<py::buffer_info> held_;
  std::vector<Set> sets_;
};

// Ranges [first, second) of tensor numbers. Each range is one operation.
using Groups = std::vector<std::pair<size_t, size_t>>;

void Check(const Groups& groups, size_t tensors) {
  for (const auto& [begin, end] : groups) {
    if (begin >= end || end > tensors)
      throw Error(KF_INVALID, Text("group [", begin, ", ", end, ") is not a range of the ", tensors, " tensors"));
  }
}

// Takes `samples` samples of `batch` calls each, and returns the seconds per call for each sample.
// Before each sample, all ranks wait for each other so that they start together. All ranks also
// wait after the last sample. Otherwise a rank that has finished could start other work on a core
// that the other ranks need.
template <typename Barrier, typename Call>
std::vector<double> Time(size_t samples, size_t batch, const Barrier& barrier, const Call& call) {
  using Clock = std::chrono::steady_clock;
  py::gil_scoped_release release;
  std::vector<double> seconds(samples);
  size_t turn = 0;
  for (double& sample : seconds) {
    barrier();
    const auto begin = Clock::now();
    for (size_t i = 0; i < batch; i++) call(turn++);
    sample = std::chrono::duration<double>(Clock::now() - begin).count() / static_cast<double>(batch);
  }
  barrier();
  return seconds;
}

void Barrier(Communicator& communicator) { communicator.Run({Kind::kBarrier, "bench/barrier"}); }

std::vector<double> TimeCollective(const std::string& kind, const std::string& name, const Sets::Buffers& buffers,
                                   const Groups& groups, int dtype, int op, uint32_t root, size_t samples,
                                   size_t batch) {
  const Kind what = kind == "broadcast" ? Kind::kBroadcast : Kind::kAllReduce;
  const auto type = static_cast<kf_dtype>(dtype);
  const Sets sets(buffers, SizeOf(type));
  Check(groups, sets[0].size());
  std::vector<std::string> names;
  for (size_t g = 0; g < groups.size(); g++) names.push_back(Text(name, "/", g));
  const auto communicator = Peer::Get().Current();
  return Time(
      samples, batch, [&] { Barrier(*communicator); },
      [&](size_t turn) {
        const Set& set = sets[turn];
        for (size_t g = 0; g < groups.size(); g++) {
          const auto [begin, end] = groups[g];
          communicator->Run(
              {what, names[g].c_str(), set.data() + begin, end - begin, type, static_cast<kf_op>(op), root});
        }
      });
}

// Functions and handles of an MPI library, which Python passes as addresses. Python has already
// loaded the library, so the build needs no MPI. A handle is a pointer in some libraries and an int
// in others. Both fit into a register.
using Handle = uintptr_t;
using MpiAllReduce = int (*)(const void*, void*, int, Handle, Handle, Handle);
using MpiBroadcast = int (*)(void*, int, Handle, int, Handle);
using MpiBarrier = int (*)(Handle);

void CheckMpi(int code) {
  if (code != 0) throw Error(KF_INTERNAL, Text("the MPI library returned ", code));
}

int MpiCount(uint64_t count) {
  if (count > INT_MAX) throw Error(KF_INVALID, Text("MPI accepts at most ", INT_MAX, " elements, got ", count));
  return static_cast<int>(count);
}

// Measures an MPI library. MPI accepts only one contiguous buffer. So the loop packs a group of
// several tensors into a buffer, and unpacks the result from another buffer.
std::vector<double> TimeMpi(const std::string& kind, Handle function, Handle barrier, const Sets::Buffers& buffers,
                            const Groups& groups, size_t unit, Handle datatype, Handle op, int root, Handle comm,
                            size_t samples, size_t batch) {
  const Sets sets(buffers, unit);
  Check(groups, sets[0].size());
  std::vector<uint64_t> counts;
  uint64_t packed = 0;
  for (const auto& [begin, end] : groups) {
    uint64_t count = 0;
    for (size_t i = begin; i < end; i++) count += sets[0][i].count;
    MpiCount(count);
    counts.push_back(count);
    if (end - begin > 1) packed = std::max(packed, count);
  }
  std::vector<char> to(packed * unit), from(packed * unit);
  const auto all_reduce = reinterpret_cast<MpiAllReduce>(function);
  const auto broadcast = reinterpret_cast<MpiBroadcast>(function);
  const auto mpi_barrier = reinterpret_cast<MpiBarrier>(barrier);
  const auto run = [&](const void* in, void* out, int count) {
    if (kind == "broadcast") {
      CheckMpi(broadcast(out, count, datatype, root, comm));
    } else {
      CheckMpi(all_reduce(in, out, count, datatype, op, comm));
    }
  };
  return Time(
      samples, batch, [&] { CheckMpi(mpi_barrier(comm)); },
      [&](size_t turn) {
        const Set& set = sets[turn];
        for (size_t g = 0; g < groups.size(); g++) {
          const kf_tensor* begin = set.data() + groups[g].first;
          const kf_tensor* end = set.data() + groups[g].second;
          if (end - begin == 1) {
            run(begin->input, begin->output, static_cast<int>(counts[g]));
            continue;
          }
          // MPI broadcasts in place, so the result is in the packed buffer.
          char* result = kind == "broadcast" ? to.data() : from.data();
          size_t at = 0;
          for (const kf_tensor* t = begin; t < end; at += t->count * unit, t++) {
            std::memcpy(to.data() + at, t->input, t->count * unit);
          }
          run(to.data(), result, static_cast<int>(counts[g]));
          at = 0;
          for (const kf_tensor* t = begin; t < end; at += t->count * unit, t++) {
            std::memcpy(t->output, result + at, t->count * unit);
          }
        }
      });
}

std::vector<double> TimeMemcpy(const Sets::Buffers& buffers, size_t samples, size_t batch) {
  const Sets sets(buffers, 1);
  const auto communicator = Peer::Get().Current();
  return Time(
      samples, batch, [&] { Barrier(*communicator); },
      [&](size_t turn) {
        for (const kf_tensor& tensor : sets[turn]) std::memcpy(tensor.output, tensor.input, tensor.count);
      });
}

}  // namespace

void RegisterBench(py::module_& m) {
  m.def("_time_collective", &TimeCollective, py::arg("kind"), py::arg("name"), py::arg("sets"), py::arg("groups"),
        py::arg("dtype"), py::arg("op"), py::arg("root"), py::arg("samples"), py::arg("batch"));
  m.def("_time_mpi", &TimeMpi, py::arg("kind"), py::arg("function"), py::arg("barrier"), py::arg("sets"),
        py::arg("groups"), py::arg("unit"), py::arg("datatype"), py::arg("op"), py::arg("root"), py::arg("comm"),
        py::arg("samples"), py::arg("batch"));
  m.def("_time_memcpy", &TimeMemcpy, py::arg("sets"), py::arg("samples"), py::arg("batch"));
}

}  // namespace kungfu
