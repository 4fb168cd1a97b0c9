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

// KungFu's strategies between hosts. Strategies that differ only within a host have the same value
// here.
enum class Strategy : uint32_t {
  kAuto,             // AUTO: the fastest algorithm according to the hosts' measurements
  kRing,             // RING
  kStar,             // STAR, TREE: all data goes to the first host and back
  kMultiStar,        // MULTI_STAR, CLIQUE: 1/n of the data goes to each host and back
  kBinaryTree,       // BINARY_TREE, BINARY_TREE_STAR: data goes up and down one tree, whose root is the first host
  kMultiBinaryTree,  // MULTI_BINARY_TREE_STAR: one tree per host, each with 1/n of the data
};

// Returns the strategy with this KungFu name. Throws ValueError if there is no such strategy.
Strategy StrategyNamed(const std::string& name);

// A host's measurements of its network to the other hosts (meter.h), as whole numbers. 0 means that
// there is no measurement yet.
struct Figures {
  uint32_t step_ns = 0;  // time that a host waits for a message
  uint32_t byte_ps = 0;  // time per byte of an operation, through the slowest network interface of all hosts
  // The measured rate of the host's own network interface, in bytes per millisecond. If `is_all` is
  // set, this rate is the limit of the network. Otherwise it is a lower bound of the limit.
  uint32_t cable = 0;
  uint32_t is_all = 0;
};

// Selects the algorithm for an all-reduce of `bytes` bytes between hosts with the measurements
// `of_hosts`. AUTO selects the cheapest algorithm in an alpha-beta model with the worst figures of
// all hosts. `beside` is the number of all-reduces that run at the same time. These all-reduces
// share the network interfaces, but their waits for messages overlap. If the selected algorithm
// doesn't accept this size, returns Doubling.
//
// - Doubling sends all bytes in each step, and reduces between the steps. Ring has more steps with
//   fewer bytes.
// - The slowest network interface limits Ring, because this interface must carry 2 (n-1)/n of the
//   bytes. A binary tree can have the hosts with slow interfaces as its leaves, so that a slow
//   interface carries all bytes once up and once down. The tree is faster if there are at least
//   three hosts and the other interfaces are three times as fast.
//
// The computation uses whole numbers, so hosts with different compilers and processors select the
// same algorithm.
std::unique_ptr<const Algorithm> SelectAlgorithm(Strategy strategy, const std::vector<Figures>& of_hosts,
                                                 uint64_t bytes, uint32_t beside);

// Selects the tree in which one host's data is sent to all other hosts.
Shape SelectBroadcastShape(Strategy strategy, const std::vector<Figures>& of_hosts, uint64_t bytes);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_SELECTOR_H_
