#include "collectives/hosts/strategy.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"

namespace kungfu::hosts {

Strategy StrategyNamed(const std::string& name) {
  static const std::pair<const char*, Strategy> kNames[] = {
      {"AUTO", Strategy::kAuto},
      {"RING", Strategy::kRing},
      {"STAR", Strategy::kStar},
      {"TREE", Strategy::kStar},  // KungFu's is a star of hosts, and one of ranks in each of them
      {"MULTI_STAR", Strategy::kMultiStar},
      {"CLIQUE", Strategy::kMultiStar},  // a star around each rank
      {"BINARY_TREE", Strategy::kBinaryTree},
      {"BINARY_TREE_STAR", Strategy::kBinaryTree},
      {"MULTI_BINARY_TREE_STAR", Strategy::kMultiBinaryTree},
  };
  for (const auto& [known, strategy] : kNames) {
    if (name == known) return strategy;
  }
  throw Error(KF_INVALID, Text("there is no strategy \"", name, "\" between hosts"));
}

// Places are counted from the root, which is 0.
//
// kBinomial: a host's parent is the place without its lowest bit, its children have one bit more below that. Who has
// most below him is sent to first.
Branch BranchOf(Shape shape, uint32_t hosts, uint32_t root, uint32_t host) {
  const uint32_t own = (host + hosts - root) % hosts;
  uint32_t parent = 0;
  std::vector<uint32_t> children;
  switch (shape) {
    case Shape::kChain:
      if (own > 0) parent = own - 1;
      children = {own + 1};
      break;
    case Shape::kStar:
      for (uint32_t other = 1; own == 0 && other < hosts; other++) children.push_back(other);
      break;
    case Shape::kBinary:
      if (own > 0) parent = (own - 1) / 2;
      children = {2 * own + 1, 2 * own + 2};
      break;
    case Shape::kBinomial: {
      parent = own & (own - 1);
      uint32_t bit = 1;
      while (own == 0 ? bit < hosts : (own & bit) == 0) bit *= 2;
      for (bit /= 2; bit > 0; bit /= 2) children.push_back(own + bit);
      break;
    }
  }
  Branch branch{(parent + root) % hosts, {}};
  for (const uint32_t child : children) {
    if (child < hosts) branch.children.push_back((child + root) % hosts);
  }
  return branch;
}

namespace {

constexpr uint64_t kMostBytes = 1 << 30;  // more changes nothing, and might overflow
constexpr uint32_t kMostFigure = 100'000'000;
// Assumed until they are measured: 0.1 ms for a message's way through both kernels and the links' threads, 1 Gbit/s.
constexpr Figures kAssumed{100'000, 8'000};
// What of a byte's time recursive doubling spends on reducing it while nothing is sent: measured, so that two hosts
// change over at 128 KiB.
constexpr uint64_t kUnhiddenReduction = 10;  // a tenth

// The worst of what was measured.
Figures WorstOf(const std::vector<Figures>& of_hosts) {
  Figures worst;
  for (const Figures& each : of_hosts) {
    worst.step_ns = std::max(worst.step_ns, each.step_ns);
    worst.byte_ps = std::max(worst.byte_ps, each.byte_ps);
  }
  worst.step_ns = worst.step_ns == 0 ? kAssumed.step_ns : std::min(worst.step_ns, kMostFigure);
  worst.byte_ps = worst.byte_ps == 0 ? kAssumed.byte_ps : std::min(worst.byte_ps, kMostFigure);
  return worst;
}

// Picoseconds of a byte through that host's cable.
uint64_t CableByte(const Figures& host) { return std::min<uint64_t>(1'000'000'000 / host.cable, kMostFigure); }

// A tree with the slow hosts for its leaves, where that is worth a tenth of the ring's time.
std::optional<Way> AroundSlowHosts(const std::vector<Figures>& of_hosts, uint64_t bytes, uint32_t beside) {
  const auto n = static_cast<uint32_t>(of_hosts.size());
  uint64_t slowest = 0;
  for (const Figures& host : of_hosts) {
    if (host.cable == 0) return std::nullopt;
    if (host.is_all != 0) slowest = std::max(slowest, CableByte(host));
  }
  Way way{Way::kTrees, Shape::kBinary, false, {}};
  for (uint32_t h = 0; h < n; h++) way.order.push_back(h);
  std::stable_sort(way.order.begin(), way.order.end(),
                   [&](uint32_t a, uint32_t b) { return of_hosts[a].cable > of_hosts[b].cable; });
  const uint64_t ring = CostOf(Way{Way::kRing}, n, bytes).bytes * slowest;
  uint64_t tree = 0;
  for (uint32_t place = 0; place < n; place++) {
    const uint64_t children = BranchOf(way.shape, n, 0, place).children.size();
    const uint64_t load = place == 0 ? std::max<uint64_t>(children, 1) : 1 + children;
    tree = std::max(tree, load * bytes * CableByte(of_hosts[way.order[place]]));
  }
  // A slow host's first piece has to go up, and its sum down, with nothing else of the operation under way.
  tree += 2 * std::min<uint64_t>(bytes, kPieceBytes) * slowest / beside;
  if (tree > ring / 10 * 9) return std::nullopt;
  return way;
}

Way AutoWay(const std::vector<Figures>& of_hosts, uint64_t bytes, uint32_t beside) {
  const auto n = static_cast<uint32_t>(of_hosts.size());
  const Figures worst = WorstOf(of_hosts);
  const auto picoseconds = [&](const Cost& cost) {
    return cost.steps * worst.step_ns * 1000 / beside + cost.bytes * worst.byte_ps;
  };
  const Cost doubling = CostOf(Way{Way::kDoubling}, n, bytes), ring = CostOf(Way{Way::kRing}, n, bytes);
  const uint64_t by_doubling = picoseconds(doubling) + doubling.bytes * worst.byte_ps / kUnhiddenReduction;
  if (n == 1 || by_doubling < picoseconds(ring)) return {};
  if (n > 2) {
    if (const auto way = AroundSlowHosts(of_hosts, bytes, beside)) return *way;
  }
  return Way{Way::kRing};
}

}  // namespace

Way WayOf(Strategy strategy, const std::vector<Figures>& of_hosts, uint64_t bytes, uint32_t beside) {
  if (of_hosts.size() == 1) return {};  // it makes a copy
  switch (strategy) {
    case Strategy::kAuto:
      return AutoWay(of_hosts, std::min(bytes, kMostBytes), beside);
    case Strategy::kRing:
      return Way{Way::kRing};
    case Strategy::kStar:
      return Way{Way::kTrees, Shape::kStar, false, {}};
    case Strategy::kMultiStar:
      return Way{Way::kTrees, Shape::kStar, true, {}};
    case Strategy::kBinaryTree:
      return Way{Way::kTrees, Shape::kBinary, false, {}};
    case Strategy::kMultiBinaryTree:
      return Way{Way::kTrees, Shape::kBinary, true, {}};
  }
  KUNGFU_CHECK(false, "strategy ", static_cast<uint32_t>(strategy));
}

Cost CostOf(const Way& way, uint32_t hosts, uint64_t bytes) {
  const uint64_t n = hosts;
  uint64_t doublings = 0;
  while (n >> (doublings + 1) != 0) doublings++;
  switch (way.kind) {
    case Way::kRing:
      return {2 * (n - 1), 2 * (n - 1) * bytes / n};
    case Way::kTrees:
      return {2 * doublings, bytes};
    case Way::kDoubling:
      break;
  }
  const uint64_t steps = doublings + ((n & (n - 1)) == 0 ? 0 : 2);
  return {steps, steps * bytes};
}

Shape BroadcastShapeOf(Strategy strategy, const std::vector<Figures>& of_hosts, uint64_t bytes) {
  switch (strategy) {
    case Strategy::kAuto: {
      // The root of a binomial tree sends everything to log2(n) hosts, and in a chain to one; but the last of a chain
      // hears of it after n-1 messages.
      const Figures worst = WorstOf(of_hosts);
      const uint64_t n = of_hosts.size(), all = std::min(bytes, kMostBytes),
                     piece = std::min<uint64_t>(all, kPieceBytes);
      uint64_t children = 0;
      while (uint64_t{1} << children < n) children++;
      const uint64_t tree = children * (worst.step_ns * uint64_t{1000} + all * worst.byte_ps);
      const uint64_t chain = (n - 1) * (worst.step_ns * uint64_t{1000} + piece * worst.byte_ps) + all * worst.byte_ps;
      return chain < tree ? Shape::kChain : Shape::kBinomial;
    }
    case Strategy::kRing:
      return Shape::kChain;
    case Strategy::kStar:
    case Strategy::kMultiStar:
      return Shape::kStar;
    case Strategy::kBinaryTree:
    case Strategy::kMultiBinaryTree:
      return Shape::kBinary;
  }
  KUNGFU_CHECK(false, "strategy ", static_cast<uint32_t>(strategy));
}

}  // namespace kungfu::hosts
