// An all-reduce in two halves, for what MindSpore does between them.
#include <cstring>
#include <stdexcept>

#include "collective.h"

namespace mindspore::kernel::kungfu {

// One tensor or a tuple of tensors in; as many out, which have no value before the wait, and the tickets (uint64), one
// for each dtype.
class KungFuAllReduceStart : public Collective {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    op_ = ReduceOp();
    return Collective::Init(inputs, outputs);
  }

  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs) override {
    tickets_.clear();
    Collective::Launch(inputs, workspace, KernelTensors(outputs.begin(), outputs.end() - 1));
    if (outputs.back()->size() != tickets_.size() * sizeof(uint64_t)) {
      throw std::runtime_error("InternalError: " + kernel_name_ + " \"" + name_ + "\" has " +
                               std::to_string(tickets_.size()) + " tickets and " +
                               std::to_string(outputs.back()->size()) + " bytes for them");
    }
    std::memcpy(outputs.back()->device_ptr(), tickets_.data(), outputs.back()->size());
    return true;
  }

 protected:
  kf_status Run(const std::vector<kf_tensor>& tensors, kf_dtype dtype) override {
    uint64_t ticket = 0;
    const auto status =
        kf_start_all_reduce(name_.c_str(), tensors.data(), tensors.size(), dtype, op_, layout_.c_str(), &ticket);
    tickets_.push_back(ticket);
    return status;
  }

 private:
  kf_op op_{KF_SUM};
  std::vector<uint64_t> tickets_;
};

// The outputs of `starts` starts in, first all tensors, then all tickets; the same out, in place, the tensors with
// their values. (The tickets come out only because MindSpore takes outputs in place for all inputs or for none.) Being
// inputs here keeps the outputs of the starts alive until the results are written into them.
class KungFuAllReduceWait : public NativeCpuKernelMod {
 public:
  using KernelTensors = std::vector<KernelTensor*>;

  bool Init(const KernelTensors&, const KernelTensors&) override {
    starts_ = static_cast<size_t>(GetValue<int64_t>(primitive_->GetAttr("starts")));
    return true;
  }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    return NativeCpuKernelMod::Resize(inputs, outputs);
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs) override {
    tickets_.clear();
    for (size_t i = inputs.size() - starts_; i < inputs.size(); ++i) {
      const auto* begin = static_cast<const uint64_t*>(inputs[i]->device_ptr());
      tickets_.insert(tickets_.end(), begin, begin + inputs[i]->size() / sizeof(uint64_t));
    }
    Check(kf_wait(tickets_.data(), tickets_.size()));
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i]->device_ptr() != inputs[i]->device_ptr()) {
        std::memcpy(outputs[i]->device_ptr(), inputs[i]->device_ptr(), outputs[i]->size());
      }
    }
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override { return {KernelAttr().AddSkipCheckAttr(true).AddAllOutInRef(true)}; }

 private:
  size_t starts_{0};
  std::vector<uint64_t> tickets_;
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduceStart, KungFuAllReduceStart);
MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduceWait, KungFuAllReduceWait);

}  // namespace mindspore::kernel::kungfu
