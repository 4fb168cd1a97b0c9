// The collectives on an Ascend device: registered through MindSpore's factory of custom kernels.
#ifndef KUNGFU_KERNELS_ASCEND_COLLECTIVE_H_
#define KUNGFU_KERNELS_ASCEND_COLLECTIVE_H_

#include <memory>

#include "common/groups.h"
#include "common/on_device.h"
#include "include/kernel/ascend/custom/kernel_mod_impl/custom_kernel_factory.h"

namespace mindspore::kernel::kungfu {

using Collective = CollectiveOnDevice<KernelMod>;

// Whether the name was free. It is done when the plugin is loaded, where nothing can be thrown; plugin.cc tells.
template <typename Kernel>
bool Register(const char* name) {
  return CustomKernelFactory::Instance().Register(name, [] { return std::make_shared<Kernel>(); });
}

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_ASCEND_COLLECTIVE_H_
