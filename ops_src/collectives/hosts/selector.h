// Selects the algorithms for operations between hosts.
#ifndef KUNGFU_COLLECTIVES_HOSTS_SELECTOR_H_
#define KUNGFU_COLLECTIVES_HOSTS_SELECTOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/hosts/algorithm.h"
#include "collectives/hosts/tree_shape.h"

namespace kungfu::hosts {

// KungFu's strategies between hosts. Strategies that differ only within a host are equal here.
enum class Strategy : uint32_t {
  kAuto,             // AUTO: the fastest algorithm according to the hosts' measurements
  kRing,             // RING
  kStar,             // STAR, TREE: to the first host and back
  kMultiStar,        // MULTI_STAR, CLIQUE: 1/n of the data to each host and back
  kBinaryTree,       // BINARY_TREE, BINARY_TREE_STAR: up and down one tree, whose root is the first host
  kMultiBinaryTree,  // MULTI_BINARY_TREE_STAR: one tree per host, each with 1/n of the data
};

// Returns the strategy with this KungFu name. Throws ValueError if there is none.
Strategy StrategyNamed(const std::string& name);

// What a host has measured of its network to the other hosts (meter.h), in whole numbers. 0 means not measured yet.
struct Figures {
  uint32_t step_ns = 0;  // time of a message that a host waits for
  uint32_t byte_ps = 0;  // time of a byte of an operation, through the slowest cable of all hosts
  // What the host's own cable carries, in bytes per millisecond. It is a lower bound or, with `is_all`, the limit of
  // the network.
  uint32_t cable = 0;
  uint32_t is_all = 0;
};

// Selects the algorithm for `bytes` between hosts that have measured `of_hosts`. With AUTO, this is the cheapest
// algorithm by an alpha-beta model with the worst figures of all hosts. `beside` is the number of all-reduces that run
// at the same time. They share the cables, but their waits for messages overlap. If the selected algorithm doesn't
// accept this size, Doubling is returned.
//
// - Doubling sends all bytes in each of its steps, and reduces between the steps. Ring has more steps with fewer bytes.
// - Ring is limited by the slowest cable, which must carry 2 (n-1)/n of the bytes. A binary tree can have the hosts
//   with slow cables as its leaves. Then a slow cable carries all bytes once up and once down. That is faster with
//   three or more hosts, if the other cables are three times as fast.
//
// The computation uses whole numbers, so hosts with different compilers and processors select the same algorithm.
std::unique_ptr<const Algorithm> SelectAlgorithm(Strategy strategy, const std::vector<Figures>& of_hosts,
                                                 uint64_t bytes, uint32_t beside);

// Selects the tree in which one host's data is sent to all other hosts.
Shape SelectBroadcastShape(Strategy strategy, const std::vector<Figures>& of_hosts, uint64_t bytes);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_SELECTOR_H_
