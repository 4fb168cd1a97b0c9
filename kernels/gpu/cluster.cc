#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuCluster : public ClusterOn<NativeGpuKernelMod> {};

MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuCluster, KungFuCluster);

}  // namespace mindspore::kernel::kungfu
