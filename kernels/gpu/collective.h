// The collectives on a GPU: registered natively, as MindSpore's own kernels are.
#ifndef KUNGFU_KERNELS_GPU_COLLECTIVE_H_
#define KUNGFU_KERNELS_GPU_COLLECTIVE_H_

#include "common/groups.h"
#include "common/on_device.h"
#include "mindspore/ops/kernel/gpu/gpu_kernel.h"

namespace mindspore::kernel::kungfu {

using Collective = CollectiveOnDevice<NativeGpuKernelMod>;

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_GPU_COLLECTIVE_H_
