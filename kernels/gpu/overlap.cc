#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllReduceStart : public AllReduceStartOn<Collective> {};
class KungFuAllReduceWait : public AllReduceWaitOn<NativeGpuKernelMod> {};

MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuAllReduceStart, KungFuAllReduceStart);
MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuAllReduceWait, KungFuAllReduceWait);

}  // namespace mindspore::kernel::kungfu
