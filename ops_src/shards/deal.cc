#include "shards/deal.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace kungfu::shards {

Deal::Deal(uint32_t leaves, const Members& members, const std::vector<uint32_t>& weights) {
  const std::vector<uint32_t> even(members.size(), 1);
  const std::vector<uint32_t>& counts = weights.empty() ? even : weights;
  KUNGFU_CHECK(counts.size() == members.size(), counts.size(), " weights for ", members.size(), " members");
  const uint64_t total = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  KUNGFU_CHECK(total > 0, "no member has a weight");
  const uint64_t sure = std::min<uint64_t>(leaves, members.size());  // one each
  uint64_t before = 0;
  uint32_t next = 0;
  for (size_t i = 0; i < members.size(); i++) {
    before += counts[i];
    const auto end = static_cast<uint32_t>(std::min<uint64_t>(i + 1, sure) + (leaves - sure) * before / total);
    Leaves& mine = of_[members[i]];
    for (; next < end; next++) mine.push_back(next);
  }
}

void Deal::Lose(uint32_t rank) {
  const Leaves lost = Of(rank);
  of_.erase(rank);
  size_t place = 0, next = 0;
  for (auto& [_, mine] : of_) {
    place++;
    for (; next < lost.size() * place / of_.size(); next++) mine.push_back(lost[next]);
    std::sort(mine.begin(), mine.end());
  }
}

const Leaves& Deal::Of(uint32_t rank) const {
  static const Leaves none;
  const auto found = of_.find(rank);
  return found == of_.end() ? none : found->second;
}

}  // namespace kungfu::shards
