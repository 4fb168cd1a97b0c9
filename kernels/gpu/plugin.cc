// The MindSpore plugin for GPUs. It registers its kernels like MindSpore's own GPU kernels.
#include "common/accelerator.h"
#include "common/kernels.h"
#include "mindspore/ops/kernel/gpu/gpu_kernel.h"

extern "C" __attribute__((visibility("default"))) const char* kungfu_ms_version() { return KUNGFU_MINDSPORE_VERSION; }

namespace mindspore::kernel::kungfu {
namespace {

auto& factory = Factory<NativeGpuKernelMod>::Instance();
[[maybe_unused]] const bool added = AddAll<Accelerator<NativeGpuKernelMod>>(factory);

}  // namespace

extern "C" __attribute__((visibility("default"))) KernelMod* kungfu_ms_make(const char* name) {
  return MakeForTests(factory, name);
}

}  // namespace mindspore::kernel::kungfu
