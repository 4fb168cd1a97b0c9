// Trees of hosts.
#ifndef KUNGFU_COLLECTIVES_HOSTS_TREE_SHAPE_H_
#define KUNGFU_COLLECTIVES_HOSTS_TREE_SHAPE_H_

#include <cstdint>
#include <vector>

namespace kungfu::hosts {

// A tree that reaches all hosts of a group, which are counted from 0.
enum class Shape {
  kChain,
  kStar,
  kBinary,
  kBinomial,  // for few bytes: after k steps 2^k hosts have them
};

// A host's place in a tree.
struct Branch {
  uint32_t parent;                 // the root's is itself
  std::vector<uint32_t> children;  // in the order in which they are sent to
};
Branch BranchOf(Shape shape, uint32_t hosts, uint32_t root, uint32_t host);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_TREE_SHAPE_H_
