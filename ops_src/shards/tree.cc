#include "shards/tree.h"

#include "base/error.h"

namespace kungfu::shards {

Node Tree::Highest(Node node) const {
  while (node.level < height_ && !HasShards(Sibling(node))) node = {node.level + 1, node.index / 2};
  return node;
}

std::pair<Node, Node> Tree::Children(Node node) const {
  for (;;) {
    KUNGFU_CHECK(node.level > 0, "shard ", node.index, " has no children");
    const Node left{node.level - 1, 2 * node.index}, right{node.level - 1, 2 * node.index + 1};
    if (HasShards(right)) return {left, right};
    node = left;
  }
}

std::set<Node> Tree::Cover(const Shards& shards) const {
  std::set<Node> cover;
  for (const uint32_t shard : shards) {
    Node node = NodeOf(shard);
    while (!(node == Root()) && cover.erase(Sibling(node)) > 0) node = Parent(node);
    cover.insert(node);
  }
  return cover;
}

}  // namespace kungfu::shards
