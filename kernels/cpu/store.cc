// The model store's memory is the tensors' own.
#include "common/store.h"

#include <cstring>
#include <vector>

#include "collective.h"

namespace mindspore::kernel::kungfu {
namespace {

std::vector<kf_blob> Blobs(const KernelTensors& tensors, size_t count) {
  std::vector<kf_blob> blobs;
  blobs.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    blobs.push_back({tensors[i]->device_ptr(), tensors[i]->size()});
  }
  return blobs;
}

class KungFuSaveModel : public SavingOn<NativeCpuKernelMod> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs) override {
    *static_cast<int64_t*>(outputs[0]->device_ptr()) = Save(Blobs(inputs, inputs.size()));
    return true;
  }
};

class KungFuRequestModel : public RequestingOn<NativeCpuKernelMod> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs) override {
    const Source source = Request(Blobs(outputs, inputs.size()));
    if (source.rank < 0) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        std::memcpy(outputs[i]->device_ptr(), inputs[i]->device_ptr(), inputs[i]->size());
      }
    }
    std::memcpy(outputs.back()->device_ptr(), &source, sizeof source);
    return true;
  }
};

}  // namespace

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuSaveModel, KungFuSaveModel);
MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuRequestModel, KungFuRequestModel);

}  // namespace mindspore::kernel::kungfu
