// The fixed tree in which the gradients of a step's shards are added up.
//
// A shard is a leaf of the tree. *Node* (level, index) is the sum of the existing shards from index
// << level up to, but not including, (index + 1) << level. The node is the left child plus the
// right child, or only the left child if the right child has no shards. So the number of shards
// determines the tree, and the shards' gradients determine its root, bit for bit. Neither the
// assignment of shards to members nor the order in which the shards arrive affects the root.
#ifndef KUNGFU_SHARDS_TREE_H_
#define KUNGFU_SHARDS_TREE_H_

#include <cstdint>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace kungfu::shards {

inline constexpr uint32_t kMaxShards = 4096;

struct Node {
  uint32_t level = 0;
  uint32_t index = 0;

  // Orders nodes from left to right. Two compared nodes must not have shards in common.
  bool operator<(const Node& other) const {
    return std::tuple(index << level, level) < std::tuple(other.index << other.level, other.level);
  }
  bool operator==(const Node& other) const { return level == other.level && index == other.index; }
};

// Shard numbers in ascending order, without repetitions.
using Shards = std::vector<uint32_t>;

// If a node's sibling has no shards, the node equals its parent. The highest of these equal nodes
// represents all of them.
class Tree {
 public:
  explicit Tree(uint32_t shards) : shards_(shards) {
    while ((uint64_t{1} << height_) < shards) height_++;
  }

  uint32_t shards() const { return shards_; }
  Node Root() const { return {height_, 0}; }
  Node NodeOf(uint32_t shard) const { return Highest({0, shard}); }
  // The root has no sibling, so `node` must not be the root.
  Node Sibling(Node node) const { return {node.level, node.index ^ 1}; }
  Node Parent(Node node) const { return Highest({node.level + 1, node.index / 2}); }
  // A single shard has no children, so `node` must not be the node of a single shard.
  std::pair<Node, Node> Children(Node node) const;
  // Returns the smallest set of nodes whose shards are exactly `shards`.
  std::set<Node> Cover(const Shards& shards) const;

 private:
  bool HasShards(Node node) const { return (uint64_t{node.index} << node.level) < shards_; }
  Node Highest(Node node) const;

  uint32_t shards_;
  uint32_t height_ = 0;
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_TREE_H_
