// Determines which member computes which shards in a step. The result depends only on the inputs,
// so ranks with the same inputs get the same result.
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
  // Assigns contiguous blocks of shards in the order of `members`. If there are enough shards, each
  // member gets at least one. Otherwise each of the first members gets one. `weights` contains the
  // members' speeds. If it is empty, the speeds are equal. The assignment minimizes the time at
  // which the last member finishes.
  Partition(uint32_t shards, const Members& members, const std::vector<uint32_t>& weights);

  // Removes `rank`, which has failed. Distributes its shards over the other members as evenly as
  // possible, in addition to the shards that they already have.
  void Lose(uint32_t rank);

  // Returns the rank's shards, or an empty list if the rank isn't a member.
  const Shards& Of(uint32_t rank) const;

 private:
  std::map<uint32_t, Shards> of_;  // the shards of each member
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_PARTITION_H_
