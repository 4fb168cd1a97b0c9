#include <cstdint>
#include <vector>

#include "collective.h"

namespace mindspore::kernel::kungfu {

// Nothing in; who took part in the last all-reduce and how many they were out: see kf_participants.
class KungFuCluster : public NativeCpuKernelMod {
 public:
  using KernelTensors = std::vector<KernelTensor*>;

  bool Init(const KernelTensors&, const KernelTensors&) override { return true; }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    return NativeCpuKernelMod::Resize(inputs, outputs);
  }
  bool Launch(const KernelTensors&, const KernelTensors&, const KernelTensors& outputs) override {
    uint64_t version = 0;
    uint32_t size = 0;
    Check(kf_participants(&size, &version));
    *static_cast<int64_t*>(outputs[0]->device_ptr()) = static_cast<int64_t>(version);
    *static_cast<int64_t*>(outputs[1]->device_ptr()) = static_cast<int64_t>(size);
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override {
    return {KernelAttr().AddOutputAttr(kNumberTypeInt64).AddOutputAttr(kNumberTypeInt64)};
  }
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuCluster, KungFuCluster);

}  // namespace mindspore::kernel::kungfu
