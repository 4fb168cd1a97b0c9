// What the kernels of the model store have in common on every device, on top of the device's own base class: save the
// parameters, take a neighbour's.
#ifndef KUNGFU_KERNELS_COMMON_STORE_H_
#define KUNGFU_KERNELS_COMMON_STORE_H_

#include "kungfu/store.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/groups.h"

namespace mindspore::kernel::kungfu {

// A tuple of tensors is one record, whose layout is a fingerprint of their dtypes and shapes.
template <typename Base>
class StoreOn : public Base {
 public:
  using KernelTensors = kungfu::KernelTensors;

  bool Init(const KernelTensors&, const KernelTensors&) override {
    name_ = GetValue<std::string>(this->primitive_->GetAttr("record"));
    return true;
  }

  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    const int status = Base::Resize(inputs, outputs);
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
  std::string name_;
  std::string layout_;
};

// Parameters in, the version that they were saved as out.
template <typename Base>
class SavingOn : public StoreOn<Base> {
 protected:
  int64_t Save(const std::vector<kf_blob>& blobs) const {
    uint64_t version = 0;
    Check(kf_save(this->name_.c_str(), this->layout_.c_str(), blobs.data(), blobs.size(), &version));
    return static_cast<int64_t>(version);
  }
};

// Parameters in; a neighbour's out, or these where nobody has any, and then the neighbour's rank and its version.
template <typename Base>
class RequestingOn : public StoreOn<Base> {
 public:
  using typename StoreOn<Base>::KernelTensors;

  struct Source {
    int64_t rank;  // -1: nobody has any
    int64_t version;
  };

  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    const auto& primitive = this->primitive_;
    const auto neighbour = GetValue<std::string>(primitive->GetAttr("neighbour"));
    neighbour_ = neighbour == "round-robin" ? KF_ROUND_ROBIN : KF_RANDOM;
    seed_ = static_cast<uint64_t>(GetValue<int64_t>(primitive->GetAttr("seed")));
    ahead_ = GetValue<bool>(primitive->GetAttr("prefetch"));
    return StoreOn<Base>::Init(inputs, outputs);
  }

  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    if (outputs.size() != inputs.size() + 1) {
      throw std::runtime_error("InternalError: " + this->kernel_name_ + " has " + std::to_string(inputs.size()) +
                               " inputs and " + std::to_string(outputs.size()) + " outputs");
    }
    return StoreOn<Base>::Resize(inputs, outputs);
  }

 protected:
  Source Request(const std::vector<kf_blob>& blobs) const {
    int64_t rank = -1;
    uint64_t version = 0;
    Check(kf_request_neighbour(this->name_.c_str(), this->layout_.c_str(), blobs.data(), blobs.size(), neighbour_,
                               seed_, ahead_, &rank, &version));
    return {rank, static_cast<int64_t>(version)};
  }

 private:
  kf_neighbour neighbour_{KF_RANDOM};
  uint64_t seed_{0};
  bool ahead_{true};
};

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_COMMON_STORE_H_
