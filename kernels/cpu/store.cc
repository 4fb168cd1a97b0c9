// The model store for MindSpore's graphs: save the parameters, take a neighbour's.
#include "kungfu/store.h"

#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "collective.h"

namespace mindspore::kernel::kungfu {
namespace {

using KernelTensors = std::vector<KernelTensor*>;

// What both kernels have in common: a tuple of tensors is one record, whose layout is a fingerprint of their dtypes and
// shapes.
class StoreKernel : public NativeCpuKernelMod {
 public:
  bool Init(const KernelTensors&, const KernelTensors&) override {
    name_ = GetValue<std::string>(primitive_->GetAttr("record"));
    return true;
  }

  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    const int status = NativeCpuKernelMod::Resize(inputs, outputs);
    std::string text;
    for (const auto* input : inputs) {
      text += TypeIdToString(input->dtype_id()) + "(";
      for (const auto dim : input->GetShapeVector()) {
        text += std::to_string(dim) + ",";
      }
      text += ")";
    }
    // FNV-1a: the same in every process.
    uint64_t hash = 14695981039346656037ull;
    for (const unsigned char c : text) {
      hash = (hash ^ c) * 1099511628211ull;
    }
    layout_ = "model of " + std::to_string(inputs.size()) + " tensors, " + std::to_string(hash);
    return status;
  }

  std::vector<KernelAttr> GetOpSupport() override { return {KernelAttr().AddSkipCheckAttr(true)}; }

 protected:
  static std::vector<kf_blob> Blobs(const KernelTensors& tensors, size_t count) {
    std::vector<kf_blob> blobs;
    blobs.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      blobs.push_back({tensors[i]->device_ptr(), tensors[i]->size()});
    }
    return blobs;
  }

  std::string name_;
  std::string layout_;
};

// Parameters in, the version that they were saved as out.
class KungFuSaveModel : public StoreKernel {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs) override {
    const auto blobs = Blobs(inputs, inputs.size());
    uint64_t version = 0;
    Check(kf_save(name_.c_str(), layout_.c_str(), blobs.data(), blobs.size(), &version));
    *static_cast<int64_t*>(outputs[0]->device_ptr()) = static_cast<int64_t>(version);
    return true;
  }
};

// Parameters in; a neighbour's out, or these where nobody has any, and then the neighbour's rank and its version.
class KungFuRequestModel : public StoreKernel {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    const auto neighbour = GetValue<std::string>(primitive_->GetAttr("neighbour"));
    neighbour_ = neighbour == "round-robin" ? KF_ROUND_ROBIN : KF_RANDOM;
    seed_ = static_cast<uint64_t>(GetValue<int64_t>(primitive_->GetAttr("seed")));
    ahead_ = GetValue<bool>(primitive_->GetAttr("prefetch"));
    return StoreKernel::Init(inputs, outputs);
  }

  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs) override {
    if (outputs.size() != inputs.size() + 1) {
      throw std::runtime_error("InternalError: " + kernel_name_ + " has " + std::to_string(inputs.size()) +
                               " inputs and " + std::to_string(outputs.size()) + " outputs");
    }
    const auto blobs = Blobs(outputs, inputs.size());
    int64_t rank = -1;
    uint64_t version = 0;
    Check(kf_request_neighbour(name_.c_str(), layout_.c_str(), blobs.data(), blobs.size(), neighbour_, seed_, ahead_,
                               &rank, &version));
    if (rank < 0) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        std::memcpy(outputs[i]->device_ptr(), inputs[i]->device_ptr(), inputs[i]->size());
      }
    }
    auto* source = static_cast<int64_t*>(outputs.back()->device_ptr());
    source[0] = rank;
    source[1] = static_cast<int64_t>(version);
    return true;
  }

 private:
  kf_neighbour neighbour_{KF_RANDOM};
  uint64_t seed_{0};
  bool ahead_{true};
};

}  // namespace

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuSaveModel, KungFuSaveModel);
MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuRequestModel, KungFuRequestModel);

}  // namespace mindspore::kernel::kungfu
