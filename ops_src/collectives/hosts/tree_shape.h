// Trees of hosts.
#ifndef KUNGFU_COLLECTIVES_HOSTS_TREE_SHAPE_H_
#define KUNGFU_COLLECTIVES_HOSTS_TREE_SHAPE_H_

#include <cstdint>
#include <vector>

namespace kungfu::hosts {

// The shape of a tree that contains all hosts of a group. Hosts are numbered from 0.
enum class Shape {
  kChain,
  kStar,
  kBinary,
  kBinomial,  // for small amounts of data: after k steps, 2^k hosts have the data
};

// A host's parent and children in a tree.
struct Branch {
  uint32_t parent;                 // the root is its own parent
  std::vector<uint32_t> children;  // in the order in which the host sends to them
};
Branch BranchOf(Shape shape, uint32_t hosts, uint32_t root, uint32_t host);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_TREE_SHAPE_H_
