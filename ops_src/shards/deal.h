// Who computes which leaf of a step. Pure: the same at all ranks that know the same.
#ifndef KUNGFU_SHARDS_DEAL_H_
#define KUNGFU_SHARDS_DEAL_H_

#include <cstdint>
#include <map>
#include <vector>

#include "collectives/operation.h"
#include "shards/tree.h"

namespace kungfu::shards {

class Deal {
 public:
  Deal() = default;
  // Contiguous blocks in the order of `members`, of whom each has one leaf at least, where there are as many; else the
  // first ones have one each. `weights` are the members' speeds (none: equal ones): the blocks are such that the
  // slowest is done as early as it can be.
  Deal(uint32_t leaves, const Members& members, const std::vector<uint32_t>& weights);

  // `rank` has died: its leaves are dealt to the others, as evenly as they go, beside what these have.
  void Lose(uint32_t rank);

  // Nothing for who is no member.
  const Leaves& Of(uint32_t rank) const;

 private:
  std::map<uint32_t, Leaves> of_;  // each member
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_DEAL_H_
