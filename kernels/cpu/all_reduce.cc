#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllReduce : public Reducing<Collective> {
 protected:
  kf_status Run(const Group& group) override {
    return kf_all_reduce(name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype, op_, Layout(group));
  }
};

class KungFuAllReduceGradients : public ReducingGradients<Collective> {
 protected:
  kf_status RunTogether(const std::vector<kf_group>& groups) override {
    return kf_all_reduce_gradients(groups.data(), groups.size(), op_);
  }
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduce, KungFuAllReduce);
MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduceGradients, KungFuAllReduceGradients);

}  // namespace mindspore::kernel::kungfu
