#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllReduceStart : public AllReduceStartOn<Collective> {};
class KungFuAllReduceWait : public AllReduceWaitOn<KernelMod> {};

static const bool kRegisteredKungFuAllReduceStart = Register<KungFuAllReduceStart>("KungFuAllReduceStart");
static const bool kRegisteredKungFuAllReduceWait = Register<KungFuAllReduceWait>("KungFuAllReduceWait");

}  // namespace mindspore::kernel::kungfu
