#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuCluster : public ClusterOn<KernelMod> {};

static const bool kRegisteredKungFuCluster = Register<KungFuCluster>("KungFuCluster");

}  // namespace mindspore::kernel::kungfu
