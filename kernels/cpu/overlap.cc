// An all-reduce in two halves, for what MindSpore does between them.
#include <stdexcept>

#include "collective.h"

namespace mindspore::kernel::kungfu {

// A tuple of tensors of one dtype in; as many out, which have no value before the wait, and the ticket, one uint64.
class KungFuAllReduceStart : public Reducing<Collective> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs) override {
    ticket_ = static_cast<uint64_t*>(outputs.back()->device_ptr());
    return Collective::Launch(inputs, workspace, KernelTensors(outputs.begin(), outputs.end() - 1));
  }

 protected:
  kf_status Run(const Group& group) override {
    return kf_start_all_reduce(name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype, op_,
                               Layout(group), ticket_);
  }

 private:
  uint64_t* ticket_{nullptr};  // MindSpore's, for the length of a launch
};

// In: all results of the starts, all gradients that were started, the tickets. Out: the same, in place, the results
// with their values; the others only because MindSpore knows outputs in place for all inputs or for none.
//
// Being inputs here keeps the results alive until they are written. The gradients are inputs for the order of launches:
// MindSpore orders kernels by their distance from the graph's end, and a gradient that is near it is made, and its
// reduction started, before the backward pass goes on. Without that the last groups started a layer late.
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
    for (const auto n : num_tensors_) {
      for (int64_t i = 0; i < n; ++i) {
        counts_.push_back(Count(inputs[counts_.size()]->GetShapeVector()));
      }
    }
    return status;
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs) override {
    std::vector<kf_tensor> tensors;
    tensors.reserve(counts_.size());
    for (size_t i = 0; i < counts_.size(); ++i) {
      tensors.push_back({nullptr, outputs[i]->device_ptr(), counts_[i]});
    }
    std::vector<kf_started> started;
    size_t begin = 0;
    for (size_t k = 0; k < num_tensors_.size(); ++k) {
      const auto ticket = *static_cast<const uint64_t*>(inputs[2 * counts_.size() + k]->device_ptr());
      const auto count = static_cast<size_t>(num_tensors_[k]);
      started.push_back({ticket, tensors.data() + begin, count});
      begin += count;
    }
    for (size_t i = 0; i < counts_.size(); ++i) {
      if (outputs[i]->device_ptr() != inputs[i]->device_ptr()) {
        throw std::runtime_error("InternalError: " + kernel_name_ + " was not given its outputs in place");
      }
    }
    Check(kf_wait(started.data(), started.size()));
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override { return {KernelAttr().AddSkipCheckAttr(true).AddAllOutInRef(true)}; }

 private:
  std::vector<int64_t> num_tensors_;  // of each start
  std::vector<uint64_t> counts_;      // of elements, of each tensor
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduceStart, KungFuAllReduceStart);
MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduceWait, KungFuAllReduceWait);

}  // namespace mindspore::kernel::kungfu
