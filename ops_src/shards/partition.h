// Which member computes which shard of a step. Pure: the same at all ranks that know the same.
#ifndef KUNGFU_SHARDS_PARTITION_H_
#define KUNGFU_SHARDS_PARTITION_H_

#include <cstdint>
#include <map>
#include <vector>

#include "collectives/operation.h"
#include "shards/tree.h"

namespace kungfu::shards {

class Partition {
 public:
  Partition() = default;
  // Contiguous blocks in the order of `members`. Each has at least one shard if there are as many; otherwise the first
  // ones have one each. `weights` are the members' speeds (none: equal ones): with these blocks the slowest member is
  // done as early as possible.
  Partition(uint32_t shards, const Members& members, const std::vector<uint32_t>& weights);

  // `rank` has failed: its shards are assigned to the others, as evenly as possible, in addition to theirs.
  void Lose(uint32_t rank);

  // Empty for a rank that is no member.
  const Shards& Of(uint32_t rank) const;

 private:
  std::map<uint32_t, Shards> of_;  // each member
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_PARTITION_H_
