#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllGather : public Collective {
 protected:
  kf_status Run(const std::vector<kf_tensor>& tensors, kf_dtype dtype) override {
    return kf_all_gather(name_.c_str(), tensors.data(), tensors.size(), dtype, layout_.c_str());
  }
  uint64_t OutputCount(uint64_t count) const override { return count * kf_size(); }
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllGather, KungFuAllGather);

}  // namespace mindspore::kernel::kungfu
