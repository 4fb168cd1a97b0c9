// An all-reduce in two halves, for what MindSpore does between them.
#include <stdexcept>

#include "collective.h"

namespace mindspore::kernel::kungfu {

// A tuple of tensors of one dtype in; the ticket for their reduction out, one uint64.
class KungFuAllReduceStart : public Collective {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    op_ = ReduceOp();
    return Collective::Init(inputs, outputs);
  }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    Collective::Resize(inputs, inputs);
    return NativeCpuKernelMod::Resize(inputs, outputs);  // again, for the sizes of the outputs
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs) override {
    ticket_ = static_cast<uint64_t*>(outputs[0]->device_ptr());
    return Collective::Launch(inputs, workspace, inputs);
  }

 protected:
  kf_status Run(const std::vector<kf_tensor>& tensors, kf_dtype dtype) override {
    return kf_start_all_reduce(name_.c_str(), tensors.data(), tensors.size(), dtype, op_, layout_.c_str(), ticket_);
  }

 private:
  kf_op op_{KF_SUM};
  uint64_t* ticket_{nullptr};  // MindSpore's, for the length of a launch
};

// The tensors that were started in, start after start, then the tickets; the reduced tensors out.
class KungFuAllReduceWait : public NativeCpuKernelMod {
 public:
  using KernelTensors = std::vector<KernelTensor*>;

  bool Init(const KernelTensors&, const KernelTensors&) override {
    num_tensors_ = GetValue<std::vector<int64_t>>(primitive_->GetAttr("num_tensors"));
    return true;
  }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    const int status = NativeCpuKernelMod::Resize(inputs, outputs);
    counts_.clear();
    dtypes_.clear();
    for (size_t i = 0; i < outputs.size(); ++i) {
      counts_.push_back(Count(inputs[i]->GetShapeVector()));
      dtypes_.push_back(RuntimeDtype(kernel_name_, inputs[i]->dtype_id()));
    }
    return status;
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs) override {
    std::vector<kf_tensor> tensors;
    tensors.reserve(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      tensors.push_back({inputs[i]->device_ptr(), outputs[i]->device_ptr(), counts_[i]});
    }
    std::vector<kf_started> started;
    size_t begin = 0;
    for (size_t k = 0; k < num_tensors_.size(); ++k) {
      const auto count = static_cast<size_t>(num_tensors_[k]);
      const auto ticket = *static_cast<const uint64_t*>(inputs[outputs.size() + k]->device_ptr());
      started.push_back({ticket, &tensors[begin], count, dtypes_[begin]});
      begin += count;
    }
    Check(kf_wait(started.data(), started.size()));
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override { return {KernelAttr().AddSkipCheckAttr(true)}; }

 private:
  std::vector<int64_t> num_tensors_;  // of each start
  std::vector<uint64_t> counts_;      // of elements, of each tensor
  std::vector<kf_dtype> dtypes_;
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduceStart, KungFuAllReduceStart);
MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduceWait, KungFuAllReduceWait);

}  // namespace mindspore::kernel::kungfu
