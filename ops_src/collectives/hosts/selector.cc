#include "collectives/hosts/selector.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "collectives/hosts/pieces.h"

namespace kungfu::hosts {

Strategy StrategyNamed(const std::string& name) {
  static const std::pair<const char*, Strategy> kNames[] = {
      {"AUTO", Strategy::kAuto},
      {"RING", Strategy::kRing},
      {"STAR", Strategy::kStar},
      {"TREE", Strategy::kStar},  // KungFu's TREE is a star of hosts, with a star of ranks in each host
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

namespace {

constexpr uint64_t kMostBytes = 1 << 30;  // larger sizes don't change the selection, but costs might overflow
constexpr uint32_t kMostFigure = 100'000'000;
// The figures that are assumed until there are measurements: a message takes 0.1 ms (including the
// time in the kernels and the transports' threads), and the network has 1 Gbit/s.
constexpr Figures kAssumed{100'000, 8'000};
// The fraction of the time per byte during which recursive doubling reduces data and sends nothing.
// The value was chosen by measurement: two hosts switch from doubling to the ring at 128 KiB.
constexpr uint64_t kUnhiddenReduction = 10;  // a tenth

// Returns the worst value of each figure among all hosts.
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

// Returns the time per byte through this host's network interface, in picoseconds.
uint64_t CableByte(const Figures& host) { return std::min<uint64_t>(1'000'000'000 / host.cable, kMostFigure); }

using Selected = std::unique_ptr<const Algorithm>;

// Returns a tree whose leaves are the slow hosts, if the tree takes at most 90% of the ring's time.
// Otherwise returns null.
Selected AroundSlowHosts(const std::vector<Figures>& of_hosts, uint64_t bytes, uint32_t beside) {
  const auto n = static_cast<uint32_t>(of_hosts.size());
  uint64_t slowest = 0;
  Members order;
  for (uint32_t h = 0; h < n; h++) {
    if (of_hosts[h].cable == 0) return nullptr;
    if (of_hosts[h].is_all != 0) slowest = std::max(slowest, CableByte(of_hosts[h]));
    order.push_back(h);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return of_hosts[a].cable > of_hosts[b].cable; });
  uint64_t tree = 0;
  for (uint32_t place = 0; place < n; place++) {
    const uint64_t children = BranchOf(Shape::kBinary, n, 0, place).children.size();
    const uint64_t load = place == 0 ? std::max<uint64_t>(children, 1) : 1 + children;
    tree = std::max(tree, load * bytes * CableByte(of_hosts[order[place]]));
  }
  // A slow host's first piece must go up and its sum must come down while no other piece of the
  // operation is in transit.
  tree += 2 * std::min<uint64_t>(bytes, kPieceBytes) * slowest / beside;
  const uint64_t ring = Ring().CostOf(n, bytes).bytes * slowest;
  if (tree > ring / 10 * 9) return nullptr;
  return std::make_unique<const Trees>(Shape::kBinary, /*around_each=*/false, std::move(order));
}

Selected Cheapest(const std::vector<Figures>& of_hosts, uint64_t bytes, uint32_t beside) {
  const auto n = static_cast<uint32_t>(of_hosts.size());
  const Figures worst = WorstOf(of_hosts);
  const auto picoseconds = [&](const Cost& cost) {
    return cost.steps * worst.step_ns * 1000 / beside + cost.bytes * worst.byte_ps;
  };
  const Cost doubling = Doubling().CostOf(n, bytes), ring = Ring().CostOf(n, bytes);
  const uint64_t by_doubling = picoseconds(doubling) + doubling.bytes * worst.byte_ps / kUnhiddenReduction;
  if (by_doubling < picoseconds(ring)) return std::make_unique<Doubling>();
  if (n > 2) {
    if (auto trees = AroundSlowHosts(of_hosts, bytes, beside)) return trees;
  }
  return std::make_unique<Ring>();
}

Selected OfStrategy(Strategy strategy, const std::vector<Figures>& of_hosts, uint64_t bytes, uint32_t beside) {
  switch (strategy) {
    case Strategy::kAuto:
      return Cheapest(of_hosts, std::min(bytes, kMostBytes), beside);
    case Strategy::kRing:
      return std::make_unique<Ring>();
    case Strategy::kStar:
      return std::make_unique<Trees>(Shape::kStar, /*around_each=*/false);
    case Strategy::kMultiStar:
      return std::make_unique<Trees>(Shape::kStar, /*around_each=*/true);
    case Strategy::kBinaryTree:
      return std::make_unique<Trees>(Shape::kBinary, /*around_each=*/false);
    case Strategy::kMultiBinaryTree:
      return std::make_unique<Trees>(Shape::kBinary, /*around_each=*/true);
  }
  KUNGFU_CHECK(false, "strategy ", static_cast<uint32_t>(strategy));
}

}  // namespace

Selected SelectAlgorithm(Strategy strategy, const std::vector<Figures>& of_hosts, uint64_t bytes, uint32_t beside) {
  Selected selected = OfStrategy(strategy, of_hosts, bytes, beside);
  if (selected->range().Has(static_cast<uint32_t>(of_hosts.size()), bytes)) return selected;
  return std::make_unique<Doubling>();
}

Shape SelectBroadcastShape(Strategy strategy, const std::vector<Figures>& of_hosts, uint64_t bytes) {
  switch (strategy) {
    case Strategy::kAuto: {
      // In a binomial tree, the root sends all data to log2(n) hosts. In a chain, it sends the data
      // to only one host. But the last host of a chain gets its first data only after n-1 messages.
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
