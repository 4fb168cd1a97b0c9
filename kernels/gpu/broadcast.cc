#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuBroadcast : public BroadcastOn<Collective> {};
class KungFuBroadcastInPlace : public BroadcastInPlaceOn<Collective> {};

MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuBroadcast, KungFuBroadcast);
MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuBroadcastInPlace, KungFuBroadcastInPlace);

}  // namespace mindspore::kernel::kungfu
