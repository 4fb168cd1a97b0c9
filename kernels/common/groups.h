// Code that the collective kernels share on every device. A call's tensors are grouped by dtype,
// and also by size if a limit is set. Each group becomes one operation of the runtime, which sends
// the tensors without first copying them into one array.
#ifndef KUNGFU_KERNELS_COMMON_GROUPS_H_
#define KUNGFU_KERNELS_COMMON_GROUPS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "include/runtime/hardware_abstract/kernel_base/common_utils.h"
#include "include/runtime/hardware_abstract/kernel_base/kernel.h"
#include "kungfu/c_api.h"

namespace mindspore::kernel::kungfu {

using KernelTensors = std::vector<KernelTensor*>;

// Throws a std::runtime_error with the runtime's error message if `status` isn't KF_OK. MindSpore
// passes the text of a std::runtime_error to Python unchanged. MindSpore's own exceptions sometimes
// crash when a kernel throws them from PyNative's queue. A kernel that only returned false would
// lose the message.
void Check(kf_status status);

uint64_t Count(const std::vector<int64_t>& shape);

kf_op ReduceOpOf(const PrimitivePtr& primitive);

uint32_t ClusterSize();

// The tensors that one operation of the runtime sends.
struct Group {
  kf_dtype dtype;
  size_t part;                  // see Groups::Sort
  std::vector<size_t> indices;  // the positions of the group's tensors in the call's list of tensors
  std::vector<kf_tensor> tensors;
};

// Divides the tensors of a call into groups. The groups are ordered by part, then by kf_dtype, then
// by tensor index, so the order is the same on all ranks.
class Groups {
 public:
  void Init(const PrimitivePtr& primitive);
  // Divides the tensors into groups. Tensors `i` and `j` are in different groups if `part_of(i)`
  // differs from `part_of(j)`. Set `copies` if the operation only copies elements. The tensors may
  // then have any dtype, because their elements are sent as integers of the same size.
  void Sort(const std::string& kernel, const KernelTensors& inputs, const KernelTensors& outputs, bool copies,
            const std::function<size_t(size_t)>& part_of);
  // Returns the groups, filled in with the memory addresses that this kernel launch uses.
  // `output_count(n)` returns the number of elements that the output must hold if the input has `n`
  // elements and the cluster has `ranks` ranks.
  const std::vector<Group>& Bind(const std::string& kernel, const KernelTensors& inputs, const KernelTensors& outputs,
                                 bool in_place, uint32_t ranks, const std::function<uint64_t(uint64_t)>& output_count);

  // Returns the operation's name. It is the same on all ranks.
  const std::string& name() const { return name_; }
  // Returns the shapes of all tensors in the group's part. The consistency check compares the
  // shapes between ranks. The shapes include those of the part's other groups, so that the check of
  // the first group detects a rank with a different set of dtypes. Without these shapes, the other
  // ranks would wait for that rank in a later group.
  const char* Layout(const Group& group) const { return layouts_[group.part].c_str(); }

 private:
  std::string name_;
  // The maximum number of input bytes in one operation. A larger tensor is sent alone. A negative
  // value means no limit.
  int64_t fusion_bytes_{-1};
  std::vector<Group> groups_;
  std::vector<std::string> layouts_;    // one for each part
  std::vector<uint64_t> input_counts_;  // each tensor's number of elements, counted in the dtype that is sent
  std::vector<uint64_t> output_counts_;
};

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_COMMON_GROUPS_H_
