#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuReduceScatter : public ReduceScatterOn<Collective> {};

MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuReduceScatter, KungFuReduceScatter);

}  // namespace mindspore::kernel::kungfu
