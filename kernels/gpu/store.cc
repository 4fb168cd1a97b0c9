#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuSaveModel : public SaveModelOn<NativeGpuKernelMod> {};
class KungFuRequestModel : public RequestModelOn<NativeGpuKernelMod> {};

MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuSaveModel, KungFuSaveModel);
MS_KERNEL_FACTORY_REG(NativeGpuKernelMod, KungFuRequestModel, KungFuRequestModel);

}  // namespace mindspore::kernel::kungfu
