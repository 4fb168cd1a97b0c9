#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllGather : public AllGatherOn<Collective> {};

MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuAllGather, KungFuAllGather);

}  // namespace mindspore::kernel::kungfu
