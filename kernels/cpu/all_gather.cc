#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllGather : public Collective {
 protected:
  kf_status Run(const Group& group) override {
    return kf_all_gather(name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype, Layout(group), ranks_);
  }
  uint64_t OutputCount(uint64_t count) const override { return count * ranks_; }
  bool Copies() const override { return true; }
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllGather, KungFuAllGather);

}  // namespace mindspore::kernel::kungfu
