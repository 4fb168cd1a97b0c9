#include "kungfu/c_api.h"

#include <string>
#include <tuple>
#include <vector>

#include "c_api/failure.h"
#include "runtime/peer.h"
#include "shards/step.h"

namespace {

using kungfu::Guarded;
using kungfu::Kind;
using kungfu::Operation;
using kungfu::Peer;

kf_status Run(const Operation& operation) {
  return Guarded([&] {
    kungfu::shards::Step::Get().Refuse(operation.name, /*gradients=*/false);
    Peer::Get().Current()->Run(operation);
  });
}

}  // namespace

kf_status kf_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype, kf_op op,
                        const char* layout) {
  kungfu::DelayForTests();
  return Run({Kind::kAllReduce, name, tensors, num_tensors, dtype, op, 0, layout});
}

kf_status kf_all_reduce_gradients(const kf_group* groups, size_t num_groups, kf_op op) {
  return Guarded([&] {
    for (size_t i = 0; i < num_groups; i++) kungfu::shards::Step::Get().Refuse(groups[i].name, /*gradients=*/true);
    const uint32_t weight = Peer::Get().weight();
    std::vector<Operation> operations;
    operations.reserve(num_groups);
    std::vector<std::string> layouts(num_groups);
    for (size_t i = 0; i < num_groups; i++) {
      kungfu::DelayForTests();
      const kf_group& group = groups[i];
      layouts[i] = Peer::Get().WithClaim(group.layout);
      operations.push_back({Kind::kAllReduce, group.name, group.tensors, group.num_tensors, group.dtype, op});
      operations.back().layout = layouts[i].c_str();
      operations.back().weighting = {/*applies=*/true, weight};
    }
    Peer::Get().Current()->RunAll(operations.data(), operations.size());
  });
}

kf_status kf_sum_shards(const kf_group* groups, size_t num_groups, const void* loss, int* over) {
  return Guarded([&] {
    kungfu::DelayForTests();
    std::vector<kf_group> claimed(groups, groups + num_groups);
    std::vector<std::string> layouts(num_groups);
    for (size_t i = 0; i < num_groups; i++) {
      layouts[i] = Peer::Get().WithClaim(groups[i].layout);
      claimed[i].layout = layouts[i].c_str();
    }
    *over = kungfu::shards::Step::Get().Bring(claimed.data(), claimed.size(), loss) ? 1 : 0;
  });
}

kf_status kf_shard_key(uint64_t* seed, uint64_t* step, uint32_t* shard, uint32_t* place, int* any) {
  return Guarded([&] {
    const auto key = kungfu::shards::Step::Get().NextKey();
    *any = key ? 1 : 0;
    if (key) std::tie(*seed, *step, *shard, *place) = std::tie(key->seed, key->step, key->shard, key->place);
  });
}

kf_status kf_start_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype, kf_op op,
                              const char* layout, uint64_t* ticket) {
  return Guarded([&] {
    kungfu::shards::Step::Get().Refuse(name, /*gradients=*/true);
    *ticket = 0;
    const std::string claimed = Peer::Get().WithClaim(layout);
    Operation operation{Kind::kAllReduce, name, tensors, num_tensors, dtype, op, 0, claimed.c_str()};
    operation.weighting = {/*applies=*/true, Peer::Get().weight()};
    *ticket = Peer::Get().Start(operation);
  });
}

kf_status kf_wait(const kf_started* started, size_t num_started) {
  return Guarded([&] { Peer::Get().Wait(started, num_started); });
}

kf_status kf_broadcast(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype, uint32_t root,
                       const char* layout) {
  return Run({Kind::kBroadcast, name, tensors, num_tensors, dtype, KF_SUM, root, layout});
}

kf_status kf_all_gather(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                        const char* layout, uint32_t ranks) {
  Operation operation{Kind::kAllGather, name, tensors, num_tensors, dtype, KF_SUM, 0, layout};
  operation.sized_for_ranks = ranks;
  return Run(operation);
}

kf_status kf_reduce_scatter(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype, kf_op op,
                            const char* layout, uint32_t ranks) {
  Operation operation{Kind::kReduceScatter, name, tensors, num_tensors, dtype, op, 0, layout};
  operation.sized_for_ranks = ranks;
  return Run(operation);
}

kf_status kf_barrier(const char* name) { return Run({Kind::kBarrier, name}); }

kf_status kf_resize(uint32_t size, int* changed, int* detached) {
  return Guarded([&] {
    const kungfu::ResizeOutcome outcome = Peer::Get().Resize(size);
    *changed = outcome.changed ? 1 : 0;
    *detached = outcome.detached ? 1 : 0;
  });
}

kf_status kf_participants(uint32_t* count, uint64_t* stamp) {
  return Guarded([&] {
    const auto communicator = Peer::Get().Current();
    const uint32_t generation = communicator->last_generation();
    *count = communicator->size() - generation;  // each failure increments the generation by one
    *stamp = communicator->cluster_version() | static_cast<uint64_t>(generation) << 48;
  });
}

kf_status kf_cluster(uint32_t* rank, uint32_t* size, uint64_t* version) {
  return Guarded([&] {
    const auto communicator = Peer::Get().Current();
    if (rank != nullptr) *rank = communicator->rank();
    if (size != nullptr) *size = communicator->size();
    if (version != nullptr) *version = communicator->cluster_version();
  });
}

uint32_t kf_rank(void) {
  uint32_t rank = 0;
  (void)kf_cluster(&rank, nullptr, nullptr);
  return rank;
}

uint32_t kf_size(void) {
  uint32_t size = 0;
  (void)kf_cluster(nullptr, &size, nullptr);
  return size;
}

uint64_t kf_cluster_version(void) {
  uint64_t version = 0;
  (void)kf_cluster(nullptr, nullptr, &version);
  return version;
}

const char* kf_last_error(void) { return kungfu::LastFailureOfThread(); }
