#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllReduce : public AllReduceOn<Collective> {};
class KungFuAllReduceGradients : public AllReduceGradientsOn<Collective> {};

static const bool kRegisteredKungFuAllReduce = Register<KungFuAllReduce>("KungFuAllReduce");
static const bool kRegisteredKungFuAllReduceGradients = Register<KungFuAllReduceGradients>("KungFuAllReduceGradients");

}  // namespace mindspore::kernel::kungfu
