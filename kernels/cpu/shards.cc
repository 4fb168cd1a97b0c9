#include "collective.h"

namespace mindspore::kernel::kungfu {

// The gradients of a shard in; as many out, which have a value where the last output, one bool, says that the step is
// over.
class KungFuSumShards : public Collective {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs) override {
    over_ = static_cast<bool*>(outputs.back()->device_ptr());
    return Collective::Launch(inputs, workspace, KernelTensors(outputs.begin(), outputs.end() - 1));
  }

 protected:
  void Run(const std::vector<Group>& groups) override {
    std::vector<kf_group> all;
    all.reserve(groups.size());
    for (const auto& group : groups) {
      all.push_back({name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype, Layout(group)});
    }
    int over = 0;
    Check(kf_sum_shards(all.data(), all.size(), &over));
    *over_ = over != 0;
  }
  kf_status Run(const Group&) override { throw std::runtime_error("InternalError: groups are summed together"); }

 private:
  bool* over_{nullptr};  // MindSpore's, for the length of a launch
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuSumShards, KungFuSumShards);

}  // namespace mindspore::kernel::kungfu
