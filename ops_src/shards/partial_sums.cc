#include "shards/partial_sums.h"

#include <cstring>

#include "base/error.h"
#include "collectives/dtype.h"
#include "collectives/reduce.h"

namespace kungfu::shards {

void PartialSums::Begin(kf_dtype dtype, size_t elements) {
  if (dtype != dtype_ || elements != elements_) memory_.clear();
  dtype_ = dtype;
  elements_ = elements;
  unit_ = SizeOf(dtype);
  nodes_.clear();
  free_.clear();
  for (const auto& memory : memory_) free_.push_back(memory->Get(Aligned(elements_ * unit_)));
}

void PartialSums::Add(const Tree& tree, uint32_t shard, const kf_tensor* tensors, size_t num_tensors, double share,
                      bool borrow) {
  Node node = tree.NodeOf(shard);
  KUNGFU_CHECK(nodes_.count(node) == 0, "shard ", shard, " has been added before");
  char* value = nullptr;  // null means that the value is still in the tensors
  if (share != 1) Copy(value = NewBuffer(), tensors, num_tensors, share);
  while (!(node == tree.Root())) {
    const auto sibling = nodes_.find(tree.Sibling(node));
    if (sibling == nodes_.end()) break;
    char* const other = sibling->second;
    const bool is_left = node.index % 2 == 0;
    if (value == nullptr) {
      AddTensors(other, tensors, num_tensors, is_left);
    } else {
      const void* const sides[] = {is_left ? value : other, is_left ? other : value};
      ReductionFor(dtype_, KF_SUM)(other, sides, 2, elements_);
      free_.push_back(value);
    }
    value = other;
    nodes_.erase(sibling);
    node = tree.Parent(node);
  }
  if (value == nullptr && !borrow) Copy(value = NewBuffer(), tensors, num_tensors, 1);
  nodes_[node] = value;
}

void PartialSums::Keep(const kf_tensor* tensors, size_t num_tensors) {
  for (auto& [_, value] : nodes_) {
    if (value == nullptr) Copy(value = NewBuffer(), tensors, num_tensors, 1);
  }
}

char* PartialSums::NewBuffer() {
  if (free_.empty()) {
    memory_.push_back(std::make_unique<Memory>());
    free_.push_back(memory_.back()->Get(Aligned(elements_ * unit_)));
  }
  char* const buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void PartialSums::Copy(char* to, const kf_tensor* tensors, size_t num_tensors, double share) const {
  for (size_t i = 0; i < num_tensors; i++) {
    const kf_tensor& tensor = tensors[i];
    if (tensor.count == 0) continue;
    if (share == 1) {
      std::memcpy(to, tensor.input, tensor.count * unit_);
    } else {
      BlendFor(dtype_)(to, &tensor.input, &share, 1, tensor.count);
    }
    to += tensor.count * unit_;
  }
}

void PartialSums::AddTensors(char* to, const kf_tensor* tensors, size_t num_tensors, bool tensors_left) const {
  const ReduceFn sum = ReductionFor(dtype_, KF_SUM);
  for (size_t i = 0; i < num_tensors; i++) {
    const kf_tensor& tensor = tensors[i];
    const void* const sides[] = {tensors_left ? tensor.input : to, tensors_left ? to : tensor.input};
    if (tensor.count > 0) sum(to, sides, 2, tensor.count);
    to += tensor.count * unit_;
  }
}

}  // namespace kungfu::shards
