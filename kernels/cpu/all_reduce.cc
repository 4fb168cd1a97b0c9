#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllReduce : public Collective {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    op_ = ReduceOp();
    return Collective::Init(inputs, outputs);
  }

 protected:
  kf_status Run(const std::vector<kf_tensor>& tensors, kf_dtype dtype) override {
    return kf_all_reduce(name_.c_str(), tensors.data(), tensors.size(), dtype, op_, layout_.c_str());
  }

 private:
  kf_op op_{KF_SUM};
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduce, KungFuAllReduce);

}  // namespace mindspore::kernel::kungfu
