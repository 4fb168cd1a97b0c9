#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuResize : public ResizeOn<KernelMod> {};

static const bool kRegisteredKungFuResize = Register<KungFuResize>("KungFuResize");

}  // namespace mindspore::kernel::kungfu
