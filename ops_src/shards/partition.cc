#include "shards/partition.h"

#include <algorithm>

#include "base/error.h"

namespace kungfu::shards {

Partition::Partition(uint32_t shards, const Members& members, const std::vector<uint32_t>& weights) {
  const std::vector<uint32_t> even(members.size(), 1);
  const std::vector<uint32_t>& speeds = weights.empty() ? even : weights;
  KUNGFU_CHECK(speeds.size() == members.size(), speeds.size(), " weights for ", members.size(), " members");
  KUNGFU_CHECK(std::all_of(speeds.begin(), speeds.end(), [](uint32_t s) { return s > 0; }), "a weight is 0");
  // Assign the shards one by one. Each shard goes to the member that would finish it first. The
  // first shards go to members that have no shard yet.
  std::vector<uint64_t> counts(members.size());
  for (uint32_t shard = 0; shard < shards; shard++) {
    size_t best = shard < members.size() ? shard : 0;
    for (size_t i = 0; i < members.size() && shard >= members.size(); i++) {
      if ((counts[i] + 1) * speeds[best] < (counts[best] + 1) * speeds[i]) best = i;
    }
    counts[best]++;
  }
  uint32_t next = 0;
  for (size_t i = 0; i < members.size(); i++) {
    Shards& mine = of_[members[i]];
    for (uint64_t k = 0; k < counts[i]; k++) mine.push_back(next++);
  }
}

void Partition::Lose(uint32_t rank) {
  const Shards lost = Of(rank);
  of_.erase(rank);
  size_t place = 0, next = 0;
  for (auto& [_, mine] : of_) {
    place++;
    for (; next < lost.size() * place / of_.size(); next++) mine.push_back(lost[next]);
    std::sort(mine.begin(), mine.end());
  }
}

const Shards& Partition::Of(uint32_t rank) const {
  static const Shards none;
  const auto found = of_.find(rank);
  return found == of_.end() ? none : found->second;
}

}  // namespace kungfu::shards
