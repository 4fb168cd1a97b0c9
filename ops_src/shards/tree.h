// The fixed tree by which the gradients of a step's shards are added up. Pure.
//
// A shard is a leaf; *node* (level, index) is the sum over the leaves from index << level to before (index + 1) <<
// level, as far as there are so many: left child plus right child, or the left child alone where the right one has no
// leaf. So the tree is a function of the number of leaves, and the bits of its root are one of what the leaves bring:
// not of who computes which leaf, and not of the order in which they come.
#ifndef KUNGFU_SHARDS_TREE_H_
#define KUNGFU_SHARDS_TREE_H_

#include <cstdint>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace kungfu::shards {

inline constexpr uint32_t kMaxLeaves = 4096;

struct Node {
  uint32_t level = 0;
  uint32_t index = 0;

  // From left to right, where none has a leaf in common with another.
  bool operator<(const Node& other) const {
    return std::tuple(index << level, level) < std::tuple(other.index << other.level, other.level);
  }
  bool operator==(const Node& other) const { return level == other.level && index == other.index; }
};

// Ascending, without repetitions.
using Leaves = std::vector<uint32_t>;

// A node without a sibling that has leaves is the same as its parent, and is always named as the highest one of these.
class Tree {
 public:
  explicit Tree(uint32_t leaves) : leaves_(leaves) {
    while ((uint64_t{1} << height_) < leaves) height_++;
  }

  uint32_t leaves() const { return leaves_; }
  Node Root() const { return {height_, 0}; }
  Node Leaf(uint32_t leaf) const { return Highest({0, leaf}); }
  // Of any but the root.
  Node Sibling(Node node) const { return {node.level, node.index ^ 1}; }
  Node Parent(Node node) const { return Highest({node.level + 1, node.index / 2}); }
  // Of any but a leaf's.
  std::pair<Node, Node> Children(Node node) const;
  // The fewest nodes that are the sums over exactly these leaves.
  std::set<Node> Cover(const Leaves& leaves) const;

 private:
  bool HasLeaves(Node node) const { return (uint64_t{node.index} << node.level) < leaves_; }
  Node Highest(Node node) const;

  uint32_t leaves_;
  uint32_t height_ = 0;
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_TREE_H_
