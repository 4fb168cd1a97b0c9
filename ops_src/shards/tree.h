// The fixed tree by which the gradients of a step's shards are added up. Pure.
//
// A shard is a leaf of the tree. *Node* (level, index) is the sum over the shards from index <<
// level to before (index + 1) << level, as far as they exist: left child plus right child, or the
// left child alone if the right one has no shard. So the tree is a function of the number of
// shards, and the bits of its root are a function of what the shards bring. They don't depend on
// which member computes which shard, nor on the order of arrival.
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

  // From left to right, if none has a shard in common with another.
  bool operator<(const Node& other) const {
    return std::tuple(index << level, level) < std::tuple(other.index << other.level, other.level);
  }
  bool operator==(const Node& other) const { return level == other.level && index == other.index; }
};

// Ascending, without repetitions.
using Shards = std::vector<uint32_t>;

// A node without a sibling that has shards is the same as its parent, and is always named as the highest one of these.
class Tree {
 public:
  explicit Tree(uint32_t shards) : shards_(shards) {
    while ((uint64_t{1} << height_) < shards) height_++;
  }

  uint32_t shards() const { return shards_; }
  Node Root() const { return {height_, 0}; }
  Node NodeOf(uint32_t shard) const { return Highest({0, shard}); }
  // Of any but the root.
  Node Sibling(Node node) const { return {node.level, node.index ^ 1}; }
  Node Parent(Node node) const { return Highest({node.level + 1, node.index / 2}); }
  // Of any but a shard's.
  std::pair<Node, Node> Children(Node node) const;
  // The fewest nodes that are the sums over exactly these shards.
  std::set<Node> Cover(const Shards& shards) const;

 private:
  bool HasShards(Node node) const { return (uint64_t{node.index} << node.level) < shards_; }
  Node Highest(Node node) const;

  uint32_t shards_;
  uint32_t height_ = 0;
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_TREE_H_
