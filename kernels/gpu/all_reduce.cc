#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllReduce : public AllReduceOn<Collective> {};
class KungFuAllReduceGradients : public AllReduceGradientsOn<Collective> {};

MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuAllReduce, KungFuAllReduce);
MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuAllReduceGradients, KungFuAllReduceGradients);

}  // namespace mindspore::kernel::kungfu
