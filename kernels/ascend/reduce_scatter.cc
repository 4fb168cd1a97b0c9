#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuReduceScatter : public ReduceScatterOn<Collective> {};

static const bool kRegisteredKungFuReduceScatter = Register<KungFuReduceScatter>("KungFuReduceScatter");

}  // namespace mindspore::kernel::kungfu
