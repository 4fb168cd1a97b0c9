// Which algorithms hosts reduce and copy by.
#ifndef KUNGFU_COLLECTIVES_HOSTS_SELECTOR_H_
#define KUNGFU_COLLECTIVES_HOSTS_SELECTOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/hosts/algorithm.h"
#include "collectives/hosts/tree_shape.h"

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

// That with one of KungFu's names. Throws ValueError if there is none.
Strategy StrategyNamed(const std::string& name);

// What a host has measured of the network to the others (meter.h), in whole numbers. 0: nothing yet.
struct Figures {
  uint32_t step_ns = 0;  // a message that is waited for
  uint32_t byte_ps = 0;  // a byte of an operation, through the slowest cable of all hosts
  // What its own cable carries, in bytes a millisecond, at least; with `is_all`, that is what the network lets through.
  uint32_t cable = 0;
  uint32_t is_all = 0;
};

// The algorithm for `bytes` between hosts that have measured this. With AUTO: the cheapest by a model of alpha and
// beta, in which the worst figures of any host count. `beside`: so many all-reduces are under way at a time. They share
// the cables, and the waits for their messages pass together. If the algorithm can't be run in this range: Doubling.
//
//  - Doubling sends all the bytes in each of its steps, and reduces between them; Ring takes more steps with less.
//  - Ring is as slow as the slowest cable, through which 2 (n-1)/n of the bytes have to. In a binary tree whose leaves
//    are the hosts with the slow cables all of them do, once up and once down. That is less from three hosts on, as
//    long as the others carry three times that.
//
// It is reckoned in whole numbers, so that hosts whose compilers and processors differ come to the same.
std::unique_ptr<const Algorithm> SelectAlgorithm(Strategy strategy, const std::vector<Figures>& of_hosts,
                                                 uint64_t bytes, uint32_t beside);

// The tree on which what one host has goes to all others.
Shape SelectBroadcastShape(Strategy strategy, const std::vector<Figures>& of_hosts, uint64_t bytes);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_SELECTOR_H_
