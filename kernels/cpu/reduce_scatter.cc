#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuReduceScatter : public Reducing<Collective> {
 protected:
  kf_status Run(const Group& group) override {
    return kf_reduce_scatter(name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype, op_, Layout(group),
                             ranks_);
  }
  uint64_t OutputCount(uint64_t count) const override { return count / ranks_; }
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuReduceScatter, KungFuReduceScatter);

}  // namespace mindspore::kernel::kungfu
