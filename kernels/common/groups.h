// What the kernels of the collectives have in common on every device: the tensors of a call are grouped by dtype, and
// by size if a limit is set, and each group becomes one operation of the runtime, packed there without a flat copy.
#ifndef KUNGFU_KERNELS_COMMON_GROUPS_H_
#define KUNGFU_KERNELS_COMMON_GROUPS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "include/runtime/hardware_abstract/kernel_base/common_utils.h"
#include "include/runtime/hardware_abstract/kernel_base/kernel.h"
#include "kungfu/c_api.h"

// Inside MindSpore's namespace, as all of its names are used here.
namespace mindspore::kernel::kungfu {

using KernelTensors = std::vector<KernelTensor*>;

// Throws what the runtime said. MindSpore hands the text of a std::runtime_error to Python as it is; its own exceptions
// crash now and then when they are thrown from PyNative's queue, and a plain `return false` says nothing.
void Check(kf_status status);

// The number of elements.
uint64_t Count(const std::vector<int64_t>& shape);

kf_op ReduceOpOf(const PrimitivePtr& primitive);

// The number of ranks at present.
uint32_t ClusterSize();

// What becomes one operation.
struct Group {
  kf_dtype dtype;
  size_t part;                  // see Groups::Sort
  std::vector<size_t> indices;  // of its tensors among the call's
  std::vector<kf_tensor> tensors;
};

// In ascending order of parts, then of kf_dtype, then of the tensors: the same at all ranks.
class Groups {
 public:
  void Init(const PrimitivePtr& primitive);
  // Tensors of different parts are never in one group. With `copies` the elements may be of any type: nothing is
  // computed with them, and they travel as integers of their size.
  void Sort(const std::string& kernel, const KernelTensors& inputs, const KernelTensors& outputs, bool copies,
            const std::function<size_t(size_t)>& part_of);
  // The groups with the memory of this launch. `output_count`: elements that the output has to hold for so many of the
  // input, with so many `ranks`.
  const std::vector<Group>& Bind(const std::string& kernel, const KernelTensors& inputs, const KernelTensors& outputs,
                                 bool in_place, uint32_t ranks, const std::function<uint64_t(uint64_t)>& output_count);

  // Matches the operations with the other ranks'.
  const std::string& name() const { return name_; }
  // The shapes of all tensors of a part, for the check between ranks. With several groups in it each carries the whole
  // part's: a rank that brings another set of dtypes is then found out at the first group, before it goes on to
  // something else and leaves the others waiting for a later one.
  const char* Layout(const Group& group) const { return layouts_[group.part].c_str(); }

 private:
  std::string name_;
  // The most bytes of input that go into one operation, unless one tensor is larger; without a limit if negative.
  int64_t fusion_bytes_{-1};
  std::vector<Group> groups_;
  std::vector<std::string> layouts_;    // of each part
  std::vector<uint64_t> input_counts_;  // in what they travel as
  std::vector<uint64_t> output_counts_;
};

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_COMMON_GROUPS_H_
