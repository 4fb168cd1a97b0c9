// What the kernels of the collectives have in common: the tensors of a call are grouped by dtype, and by size where a
// limit is set, and each group becomes one operation of the runtime, packed there without a flat copy.
#ifndef KUNGFU_KERNELS_CPU_COLLECTIVE_H_
#define KUNGFU_KERNELS_CPU_COLLECTIVE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kungfu/c_api.h"
#include "mindspore/ops/kernel/cpu/cpu_kernel.h"

// Inside MindSpore's namespace because its registration macro looks names up from there.
namespace mindspore::kernel::kungfu {

// Throws what the runtime said. MindSpore hands the text of a std::runtime_error to Python as it is; its own exceptions
// crash now and then when they are thrown from PyNative's queue, and a plain `return false` says nothing.
void Check(kf_status status);

// The number of elements.
uint64_t Count(const std::vector<int64_t>& shape);

// One tensor or a tuple of tensors in, as many out. Not thread-safe: MindSpore launches a kernel from one thread at a
// time.
class Collective : public NativeCpuKernelMod {
 public:
  using KernelTensors = std::vector<KernelTensor*>;

  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override;
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override;
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs) override;
  std::vector<KernelAttr> GetOpSupport() override;

 protected:
  // Runs one group; called with the groups in ascending order of kf_dtype and, of one dtype, in that of the tensors,
  // which is the same at all ranks.
  virtual kf_status Run(const std::vector<kf_tensor>& tensors, kf_dtype dtype) = 0;
  // How many elements the output has to hold for an input of `count` elements, at the present size of the cluster.
  virtual uint64_t OutputCount(uint64_t count) const { return count; }
  // Whether the outputs are the inputs, written in place.
  virtual bool InPlace() const { return false; }

  kf_op ReduceOp() const;

  std::string name_;    // matches the operation with the other ranks'
  std::string layout_;  // the shapes of all tensors of the call, for the check between ranks

 private:
  struct Group {
    kf_dtype dtype;
    std::vector<size_t> indices;
  };

  // The most bytes of input that go into one operation, unless one tensor is larger; without a limit if negative.
  int64_t fusion_bytes_{-1};
  std::vector<Group> groups_;
  std::vector<uint64_t> input_counts_;
  std::vector<uint64_t> output_counts_;
};

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_CPU_COLLECTIVE_H_
