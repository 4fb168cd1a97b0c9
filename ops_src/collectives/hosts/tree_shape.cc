#include "collectives/hosts/tree_shape.h"

namespace kungfu::hosts {

// In this function, hosts are numbered from the root, which has number 0.
//
// kBinomial: the parent's number is the host's number with the lowest set bit cleared. A child's
// number has one more bit set, below the host's lowest set bit. The host sends first to the child
// that has the most hosts below it.
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

}  // namespace kungfu::hosts
