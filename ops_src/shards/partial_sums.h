// What one rank has added up of one group of tensors.
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

// The tensors of one dtype, packed one after another. Memory is kept from step to step.
class PartialSums {
 public:
  void Begin(kf_dtype dtype, size_t elements);
  // Adds a shard, times `share`: copied, or added to its sibling, and so on upwards. With `borrow` a shard that stays
  // alone isn't copied: it is where the tensors are, until Keep.
  void Add(const Tree& tree, uint32_t shard, const kf_tensor* tensors, size_t num_tensors, double share, bool borrow);
  // What is borrowed from these tensors is copied.
  void Keep(const kf_tensor* tensors, size_t num_tensors);

  size_t elements() const { return elements_; }
  // The nodes that there are, each with its memory; null: it is borrowed.
  const std::map<Node, char*>& nodes() const { return nodes_; }

 private:
  char* NewBuffer();
  void Copy(char* to, const kf_tensor* tensors, size_t num_tensors, double share) const;
  // `to` = left + right, of which one is `to` and the other the tensors.
  void AddTensors(char* to, const kf_tensor* tensors, size_t num_tensors, bool tensors_left) const;

  kf_dtype dtype_ = KF_FLOAT32;
  size_t elements_ = 0, unit_ = 4;
  std::map<Node, char*> nodes_;
  std::vector<std::unique_ptr<Memory>> memory_;  // each of at least `elements_`
  std::vector<char*> free_;
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_PARTIAL_SUMS_H_
