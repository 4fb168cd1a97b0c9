// By which ways hosts reduce and copy.
#ifndef KUNGFU_COLLECTIVES_HOSTS_STRATEGY_H_
#define KUNGFU_COLLECTIVES_HOSTS_STRATEGY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kungfu::hosts {

// What KungFu's strategies are between hosts; those that differ within a host alone are the same here.
enum class Strategy : uint32_t {
  kAuto,             // AUTO: what takes least time, as far as the hosts have measured
  kRing,             // RING
  kStar,             // STAR, TREE: to the first host and back
  kMultiStar,        // MULTI_STAR, CLIQUE: the n-th part of it to each host and back
  kBinaryTree,       // BINARY_TREE, BINARY_TREE_STAR: up and down one tree, whose root is the first host
  kMultiBinaryTree,  // MULTI_BINARY_TREE_STAR: as many trees as hosts, the n-th part of it each
};

// What is sent, received and reduced at a time.
inline constexpr size_t kPieceBytes = 256 << 10;

// That with one of KungFu's names. Throws ValueError where there is none.
Strategy StrategyNamed(const std::string& name);

// A way to all hosts. Those of a group are counted from 0.
enum class Shape {
  kChain,
  kStar,
  kBinary,
  kBinomial,  // for few bytes: after k steps 2^k hosts have them
};

// A host's place in it.
struct Branch {
  uint32_t parent;                 // the root's is itself
  std::vector<uint32_t> children;  // in the order in which they are sent to
};
Branch BranchOf(Shape shape, uint32_t hosts, uint32_t root, uint32_t host);

// What a host has measured of its way to the others (meter.h), in whole numbers. 0: nothing yet.
struct Figures {
  uint32_t step_ns = 0;  // a message that is waited for
  uint32_t byte_ps = 0;  // a byte of an operation, through the cable of whoever has the slowest
  // What its own cable carries, in bytes a millisecond, at least; with `is_all`, that is what the network lets through.
  uint32_t cable = 0;
  uint32_t is_all = 0;
};

// How an all-reduce goes.
struct Way {
  enum Kind { kDoubling, kRing, kTrees };
  Kind kind = kDoubling;
  // Of kTrees:
  Shape shape = Shape::kBinary;
  bool many = false;                 // one around each host, or the first one's alone
  std::vector<uint32_t> order = {};  // the hosts, from the first on; empty: as they are counted

  bool operator==(const Way& other) const {
    return kind == other.kind && shape == other.shape && many == other.many && order == other.order;
  }
};

// The way of `bytes` between hosts that have measured this. With AUTO: the cheapest by a model of alpha and beta, of
// which the worst that any of them has measured count. `beside`: so many of the kind are under way at a time, and share
// the cables, while their messages' waits pass together.
//
//  - Recursive doubling sends all the bytes in each of its steps, and reduces between them; a ring takes 2 (n-1) steps,
//    and sends 2 (n-1)/n of the bytes.
//  - A ring is as slow as the slowest cable, through which 2 (n-1)/n of the bytes have to. In a binary tree whose
//  leaves
//    are the hosts with the slow ones all of them do, once each way: less from three hosts on, as long as the others
//    carry three times that.
//
// It is reckoned in whole numbers, so that hosts whose compilers and processors differ come to the same.
Way WayOf(Strategy strategy, const std::vector<Figures>& of_hosts, uint64_t bytes, uint32_t beside);

// What an all-reduce over `hosts` costs by that way: messages one after another, and bytes through a host's cable (of
// trees: the leaves').
struct Cost {
  uint64_t steps, bytes;
};
Cost CostOf(const Way& way, uint32_t hosts, uint64_t bytes);

// The way of what one host has to all others.
Shape BroadcastShapeOf(Strategy strategy, const std::vector<Figures>& of_hosts, uint64_t bytes);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_STRATEGY_H_
