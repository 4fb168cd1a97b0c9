#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllGather : public AllGatherOn<Collective> {};

static const bool kRegisteredKungFuAllGather = Register<KungFuAllGather>("KungFuAllGather");

}  // namespace mindspore::kernel::kungfu
