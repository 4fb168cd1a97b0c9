// What the plugin tells about itself.
#include <memory>
#include <vector>

#include "collective.h"

extern "C" __attribute__((visibility("default"))) const char* kungfu_ms_version() { return KUNGFU_MINDSPORE_VERSION; }

namespace mindspore::kernel::kungfu {

// A kernel of this name as MindSpore's factory of native GPU kernels makes it, kept for as long as the process lives;
// null if it knows none. For tests, which launch it as MindSpore would.
extern "C" __attribute__((visibility("default"))) KernelMod* kungfu_ms_make(const char* name) {
  static auto* const kernels = new std::vector<std::shared_ptr<KernelMod>>;
  if (!Factory<NativeGpuKernelMod>::Instance().IsRegistered(name)) {
    return nullptr;
  }
  kernels->push_back(Factory<NativeGpuKernelMod>::Instance().Create(name));
  return kernels->back().get();
}

}  // namespace mindspore::kernel::kungfu
