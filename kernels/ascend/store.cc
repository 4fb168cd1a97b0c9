#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuSaveModel : public SaveModelOn<KernelMod> {};
class KungFuRequestModel : public RequestModelOn<KernelMod> {};

static const bool kRegisteredKungFuSaveModel = Register<KungFuSaveModel>("KungFuSaveModel");
static const bool kRegisteredKungFuRequestModel = Register<KungFuRequestModel>("KungFuRequestModel");

}  // namespace mindspore::kernel::kungfu
