#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuBroadcast : public Collective {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    root_ = static_cast<uint32_t>(GetValue<int64_t>(primitive_->GetAttr("root")));
    return Collective::Init(inputs, outputs);
  }

 protected:
  kf_status Run(const Group& group) override {
    return kf_broadcast(name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype, root_, Layout(group));
  }
  bool Copies() const override { return true; }

 private:
  uint32_t root_{0};
};

// Straight into parameters. On an ordinary tensor it would overwrite a value that may be used elsewhere.
class KungFuBroadcastInPlace : public KungFuBroadcast {
 protected:
  bool InPlace() const override { return true; }
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuBroadcast, KungFuBroadcast);
MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuBroadcastInPlace, KungFuBroadcastInPlace);

}  // namespace mindspore::kernel::kungfu
