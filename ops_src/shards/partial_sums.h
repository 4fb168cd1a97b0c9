// The partial sums that one rank keeps for one group of tensors.
#ifndef KUNGFU_SHARDS_PARTIAL_SUMS_H_
#define KUNGFU_SHARDS_PARTIAL_SUMS_H_

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "base/memory.h"
#include "kungfu/c_api.h"
#include "shards/tree.h"

namespace kungfu::shards {

// Sums tensors of one dtype, which are stored one after another. The memory is reused from step to
// step.
class PartialSums {
 public:
  void Begin(kf_dtype dtype, size_t elements);
  // Adds a shard, multiplied by `share`. If the shard's sibling in the tree is present, the two are
  // added. Their sum is then added to its own sibling if that sibling is present, and so on up the
  // tree. A shard without a sibling is copied. With `borrow`, the shard stays in the tensors until
  // `Keep` is called.
  void Add(const Tree& tree, uint32_t shard, const kf_tensor* tensors, size_t num_tensors, double share, bool borrow);
  // Copies the shard that an earlier `Add` borrowed from these tensors.
  void Keep(const kf_tensor* tensors, size_t num_tensors);

  size_t elements() const { return elements_; }
  // The tree nodes that are present, each with its memory. The memory is null if the node is
  // borrowed.
  const std::map<Node, char*>& nodes() const { return nodes_; }

 private:
  char* NewBuffer();
  void Copy(char* to, const kf_tensor* tensors, size_t num_tensors, double share) const;
  // Computes `to` = left + right. One of the two operands is `to` itself, and the other one is the
  // inputs of `tensors`.
  void AddTensors(char* to, const kf_tensor* tensors, size_t num_tensors, bool tensors_left) const;

  kf_dtype dtype_ = KF_FLOAT32;
  size_t elements_ = 0, unit_ = 4;
  std::map<Node, char*> nodes_;
  std::vector<std::unique_ptr<Memory>> memory_;  // blocks with at least `elements_` elements
  std::vector<char*> free_;
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_PARTIAL_SUMS_H_
