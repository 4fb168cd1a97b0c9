// Steps that are partitions of shards.
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
    throw Error(KF_TYPE, "moving statistics are of float32 or float64");
  }
  // Through the buffer's own address: asnumpy calls an array read-only that shares a tensor's memory.
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
  } catch (const py::error_already_set& error) {  // belongs to this thread, while it has the GIL
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
      py::arg("statistics"), "The arrays are written to until the step is over.");
  m.def("missing_shards", [] { return Step::Get().Missing(); }, released);
  m.def("take_shard", [](uint32_t shard) { Step::Get().Take(shard); }, released);
  m.def("take_no_shard", [] { Step::Get().TakeNone(); }, released);
  m.def("take_shard_for_hashes", [](uint32_t shard) { Step::Get().TakeForHashes(shard); }, released);
  m.def(
      "update_follows",
      [](const py::function& where) {
        // Not owned: the caller holds it until the step is over or undone. Releasing it would take the GIL during each
        // step.
        const py::handle held = where;
        const py::gil_scoped_release release;
        Step::Get().UpdateFollows([held] { return Told(held); });
      },
      py::arg("where"),
      "Behind what is taken runs an update whatever comes. `where` tells (address, bytes) of all that it writes to; it "
      "is called on another thread, if at all, and has to live until the step is over or undone.");
  m.def("sharded_step_over", [] { return Step::Get().Over(); }, released, "Once what was taken has been brought.");
  m.def("undo_update", [] { Step::Get().UndoUpdate(); }, released, "Once it has run; nothing where the step is over.");
  m.def("shard_hashes", [] { return Step::Get().Hashes(); }, released);
  m.def("end_sharded_step", [] { Step::Get().End(); });
  m.def(
      "shard_pace", [] { return Step::Get().Pace(); }, released, "Seconds of this step, and shards computed in them.");
  m.def(
      "sharded_members", [] { return Step::Get().MembersNow(*Peer::Get().Current()); }, released,
      "The ranks to which the next step is dealt.");
  m.def(
      "flush_denormals", [](bool flushes) { return FlushDenormals(flushes); }, py::arg("flushes"),
      "Whether this thread does from now on; whether it did before.");
  m.def(
      "partition_shards",
      [](uint32_t shards, const Members& members, const std::vector<uint32_t>& weights, uint32_t rank) {
        return shards::Partition(shards, members, weights).Of(rank);
      },
      py::arg("shards"), py::arg("members"), py::arg("weights"), py::arg("rank"),
      "The shards of `rank`, ascending, of a step that `members` begin; `weights` of each of them, or none.");
}

}  // namespace kungfu
