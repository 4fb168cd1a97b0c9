// The MindSpore plugin for Ascend devices. It registers its kernels in MindSpore's factory for
// custom kernels.
#include "common/accelerator.h"
#include "common/kernels.h"
#include "include/kernel/ascend/custom/kernel_mod_impl/custom_kernel_factory.h"

extern "C" __attribute__((visibility("default"))) const char* kungfu_ms_version() { return KUNGFU_MINDSPORE_VERSION; }

namespace mindspore::kernel::kungfu {
namespace {

auto& factory = CustomKernelFactory::Instance();
[[maybe_unused]] const bool added = AddAll<Accelerator<KernelMod>>(factory);

}  // namespace

extern "C" __attribute__((visibility("default"))) KernelMod* kungfu_ms_make(const char* name) {
  return MakeForTests(factory, name);
}

}  // namespace mindspore::kernel::kungfu
