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
  // What becomes one operation.
  struct Group {
    kf_dtype dtype;
    size_t part;                  // see PartOf
    std::vector<size_t> indices;  // of its tensors among the call's
    std::vector<kf_tensor> tensors;
  };

  // Runs the groups, which come in ascending order of parts, then of kf_dtype, then of the tensors: the same at all
  // ranks.
  virtual void Run(const std::vector<Group>& groups);
  // Runs one group, where the groups have nothing to do with each other.
  virtual kf_status Run(const Group& group) = 0;
  // Tensors of different parts are never in one group.
  virtual size_t PartOf(size_t) const { return 0; }
  // How many elements the output has to hold for an input of `count` elements, at the present size of the cluster.
  virtual uint64_t OutputCount(uint64_t count) const { return count; }
  // Whether the outputs are the inputs, written in place.
  virtual bool InPlace() const { return false; }

  kf_op ReduceOp() const;

  std::string name_;  // matches the operation with the other ranks'
  // The shapes of all tensors of a part, for the check between ranks. With several groups in it each carries the whole
  // part's: a rank that brings another set of dtypes is then found out at the first group, before it goes on to
  // something else and leaves the others waiting for a later one.
  const char* Layout(const Group& group) const { return layouts_[group.part].c_str(); }

 private:
  // The most bytes of input that go into one operation, unless one tensor is larger; without a limit if negative.
  int64_t fusion_bytes_{-1};
  std::vector<Group> groups_;
  std::vector<std::string> layouts_;  // of each part
  std::vector<uint64_t> input_counts_;
  std::vector<uint64_t> output_counts_;
};

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_CPU_COLLECTIVE_H_
