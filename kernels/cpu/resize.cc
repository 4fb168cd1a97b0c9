#include <cstdint>
#include <vector>

#include "collective.h"

namespace mindspore::kernel::kungfu {

// The wanted size in, (changed, detached) out.
class KungFuResize : public NativeCpuKernelMod {
 public:
  using KernelTensors = std::vector<KernelTensor*>;

  bool Init(const KernelTensors&, const KernelTensors&) override { return true; }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    return NativeCpuKernelMod::Resize(inputs, outputs);
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs) override {
    int changed = 0;
    int detached = 0;
    Check(kf_resize(*static_cast<const uint32_t*>(inputs[0]->device_ptr()), &changed, &detached));
    *static_cast<bool*>(outputs[0]->device_ptr()) = changed != 0;
    *static_cast<bool*>(outputs[1]->device_ptr()) = detached != 0;
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override {
    return {KernelAttr().AddInputAttr(kNumberTypeUInt32).AddOutputAttr(kNumberTypeBool).AddOutputAttr(kNumberTypeBool)};
  }
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuResize, KungFuResize);

}  // namespace mindspore::kernel::kungfu
