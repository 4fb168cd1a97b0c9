// Python bindings for sharded steps.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/float_environment.h"
#include "runtime/peer.h"
#include "shards/step.h"

namespace py = pybind11;

namespace kungfu {
namespace {

shards::Statistic StatisticOf(const py::array& array) {
  kf_dtype dtype;
  if (py::isinstance<py::array_t<float>>(array)) {
    dtype = KF_FLOAT32;
  } else if (py::isinstance<py::array_t<double>>(array)) {
    dtype = KF_FLOAT64;
  } else {
    throw Error(KF_TYPE, Text("a moving statistic has dtype ", std::string(py::str(array.dtype())),
                              "; only float32 and float64 are supported"));
  }
  // Use the array's own address. `asnumpy` marks an array that shares a tensor's memory as
  // read-only, so pybind11 would give no writable address.
  return {dtype, const_cast<void*>(array.data()), static_cast<uint64_t>(array.size())};
}

std::vector<shards::Written> Told(py::handle where) {
  const py::gil_scoped_acquire acquired;
  try {
    std::vector<shards::Written> all;
    for (const auto& [address, bytes] : where().cast<std::vector<std::pair<uintptr_t, size_t>>>()) {
      all.push_back({reinterpret_cast<void*>(address), bytes});
    }
    return all;
  } catch (const py::error_already_set& error) {  // `error` must be destroyed while this thread holds the GIL
    throw Error(KF_INVALID, error.what());
  }
}

}  // namespace

void RegisterShards(py::module_& m) {
  using shards::Step;
  const auto released = py::call_guard<py::gil_scoped_release>();

  m.def(
      "begin_sharded_step",
      [](uint32_t shards, double last, bool mean, std::vector<uint32_t> weights, uint64_t seed, uint64_t step,
         const std::vector<py::array>& statistics) {
        std::vector<shards::Statistic> held;
        for (const py::array& array : statistics) held.push_back(StatisticOf(array));
        const py::gil_scoped_release release;
        Step::Get().Begin(Peer::Get().Current(), {shards, last, mean, std::move(weights), seed, step}, held);
      },
      py::arg("shards"), py::arg("last"), py::arg("mean"), py::arg("weights"), py::arg("seed"), py::arg("step"),
      py::arg("statistics"), "Begin a sharded step. The step writes to the arrays in `statistics` until it ends.");
  m.def("missing_shards", [] { return Step::Get().Missing(); }, released);
  m.def("take_shard", [](uint32_t shard) { Step::Get().Take(shard); }, released);
  m.def("take_no_shard", [] { Step::Get().TakeNone(); }, released);
  m.def("take_shard_for_hashes", [](uint32_t shard) { Step::Get().TakeForHashes(shard); }, released);
  m.def(
      "update_follows",
      [](const py::function& where) {
        // No reference is taken: the caller holds `where` until the step has ended or is undone.
        // Releasing a reference here would need the GIL in each step.
        const py::handle held = where;
        const py::gil_scoped_release release;
        Step::Get().UpdateFollows([held] { return Told(held); });
      },
      py::arg("where"),
      "Declare that an update runs after the taken shards are added, even if the step hasn't ended. `where` returns "
      "(address, bytes) of all memory that the update writes to. Another thread may call `where`, so keep `where` "
      "alive until the step has ended or is undone.");
  m.def(
      "sharded_step_over", [] { return Step::Get().Over(); }, released,
      "Return whether the step has ended. Call this after adding the shards that this rank has taken.");
  m.def(
      "undo_update", [] { Step::Get().UndoUpdate(); }, released,
      "Undo an update that has already run. Does nothing if the step has ended.");
  m.def("shard_hashes", [] { return Step::Get().Hashes(); }, released);
  m.def("end_sharded_step", [] { Step::Get().End(); });
  m.def(
      "shard_pace", [] { return Step::Get().Pace(); }, released,
      "Return (seconds of computing, number of computed shards) of this rank in this step.");
  m.def(
      "sharded_members", [] { return Step::Get().MembersNow(*Peer::Get().Current()); }, released,
      "Return the ranks that will take part in the next step.");
  m.def(
      "flush_denormals", [](bool flushes) { return FlushDenormals(flushes); }, py::arg("flushes"),
      "Set whether this thread flushes denormals to zero. Return the previous setting.");
  m.def(
      "partition_shards",
      [](uint32_t shards, const Members& members, const std::vector<uint32_t>& weights, uint32_t rank) {
        return shards::Partition(shards, members, weights).Of(rank);
      },
      py::arg("shards"), py::arg("members"), py::arg("weights"), py::arg("rank"),
      "Return, in ascending order, the shards that `rank` computes in a step of `members`. `weights`: one per member, "
      "or empty.");
}

}  // namespace kungfu
