// Code that the kernels of the collectives share on every device. The tensors of a call are grouped by dtype, and by
// size if a limit is set. Each group becomes one operation of the runtime, which packs the tensors without a flat copy.
#ifndef KUNGFU_KERNELS_COMMON_GROUPS_H_
#define KUNGFU_KERNELS_COMMON_GROUPS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "include/runtime/hardware_abstract/kernel_base/common_utils.h"
#include "include/runtime/hardware_abstract/kernel_base/kernel.h"
#include "kungfu/c_api.h"

// Inside MindSpore's namespace, because the code uses many names of that namespace.
namespace mindspore::kernel::kungfu {

using KernelTensors = std::vector<KernelTensor*>;

// Throws the runtime's error message if `status` isn't KF_OK. The exception is a std::runtime_error, because MindSpore
// passes its text to Python unchanged. MindSpore's own exceptions sometimes crash when they are thrown from PyNative's
// queue, and `return false` would lose the message.
void Check(kf_status status);

// Returns the number of elements of a tensor.
uint64_t Count(const std::vector<int64_t>& shape);

kf_op ReduceOpOf(const PrimitivePtr& primitive);

// Returns the current number of ranks.
uint32_t ClusterSize();

// The tensors that become one operation.
struct Group {
  kf_dtype dtype;
  size_t part;                  // see Groups::Sort
  std::vector<size_t> indices;  // positions of the group's tensors in the call's list
  std::vector<kf_tensor> tensors;
};

// Divides the tensors of a call into groups. The groups are in ascending order of part, then of kf_dtype, then of
// tensor index. The order is the same at all ranks.
class Groups {
 public:
  void Init(const PrimitivePtr& primitive);
  // Never puts tensors of different parts into one group. If `copies`, the operation only copies elements, so they may
  // have any type: they are sent as integers of the same size.
  void Sort(const std::string& kernel, const KernelTensors& inputs, const KernelTensors& outputs, bool copies,
            const std::function<size_t(size_t)>& part_of);
  // Returns the groups with the memory addresses of this launch. `output_count` returns the number of elements that the
  // output must hold for a given number of input elements and for `ranks` ranks.
  const std::vector<Group>& Bind(const std::string& kernel, const KernelTensors& inputs, const KernelTensors& outputs,
                                 bool in_place, uint32_t ranks, const std::function<uint64_t(uint64_t)>& output_count);

  // The name that matches the operations with the operations of the other ranks.
  const std::string& name() const { return name_; }
  // Returns the shapes of all tensors of the group's part, for the consistency check between ranks. If the part has
  // several groups, each of them carries the shapes of the whole part. A rank with a different set of dtypes is then
  // detected at the first group. Without this, that rank would continue with other work, and the other ranks would
  // wait for a later group.
  const char* Layout(const Group& group) const { return layouts_[group.part].c_str(); }

 private:
  std::string name_;
  // The maximum number of input bytes of one operation; a single tensor may be larger. Negative: no limit.
  int64_t fusion_bytes_{-1};
  std::vector<Group> groups_;
  std::vector<std::string> layouts_;    // one for each part
  std::vector<uint64_t> input_counts_;  // in elements of the dtype in which the tensor is sent
  std::vector<uint64_t> output_counts_;
};

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_COMMON_GROUPS_H_
