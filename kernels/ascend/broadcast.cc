#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuBroadcast : public BroadcastOn<Collective> {};
class KungFuBroadcastInPlace : public BroadcastInPlaceOn<Collective> {};

static const bool kRegisteredKungFuBroadcast = Register<KungFuBroadcast>("KungFuBroadcast");
static const bool kRegisteredKungFuBroadcastInPlace = Register<KungFuBroadcastInPlace>("KungFuBroadcastInPlace");

}  // namespace mindspore::kernel::kungfu
