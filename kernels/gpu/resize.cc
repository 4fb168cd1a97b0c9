#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuResize : public ResizeOn<NativeGpuKernelMod> {};

MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuResize, KungFuResize);

}  // namespace mindspore::kernel::kungfu
