// The collectives on a CPU: MindSpore launches kernels there without a stream.
#ifndef KUNGFU_KERNELS_CPU_COLLECTIVE_H_
#define KUNGFU_KERNELS_CPU_COLLECTIVE_H_

#include "common/groups.h"
#include "mindspore/ops/kernel/cpu/cpu_kernel.h"

namespace mindspore::kernel::kungfu {

class Collective : public CollectiveOn<NativeCpuKernelMod> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs) override {
    LaunchGroups(inputs, outputs);
    return true;
  }
};

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_CPU_COLLECTIVE_H_
