#include <stdexcept>

#include "collective.h"

namespace mindspore::kernel::kungfu {

class KungFuAllReduce : public Collective {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    op_ = ReduceOp();
    return Collective::Init(inputs, outputs);
  }

 protected:
  kf_status Run(const Group& group) override {
    return kf_all_reduce(name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype, op_, Layout(group));
  }

 private:
  kf_op op_{KF_SUM};
};

// The gradients of a step, in groups that are reduced one after another and, should a rank die meanwhile, with its part
// in all of them or in none.
class KungFuAllReduceGradients : public Collective {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    op_ = ReduceOp();
    names_ = GetValue<std::vector<std::string>>(primitive_->GetAttr("names"));
    group_of_ = GetValue<std::vector<int64_t>>(primitive_->GetAttr("group_of"));
    if (names_.size() > 1 && group_of_.size() != inputs.size()) {
      throw std::runtime_error("InternalError: " + kernel_name_ + " was given " + std::to_string(inputs.size()) +
                               " tensors and groups for " + std::to_string(group_of_.size()));
    }
    return Collective::Init(inputs, outputs);
  }

 protected:
  void Run(const std::vector<Group>& groups) override {
    std::vector<kf_group> all;
    all.reserve(groups.size());
    for (const auto& group : groups) {
      all.push_back(
          {names_[group.part].c_str(), group.tensors.data(), group.tensors.size(), group.dtype, Layout(group)});
    }
    Check(kf_all_reduce_gradients(all.data(), all.size(), op_));
  }
  kf_status Run(const Group&) override { throw std::runtime_error("InternalError: groups are run together"); }
  size_t PartOf(size_t i) const override { return names_.size() > 1 ? static_cast<size_t>(group_of_[i]) : 0; }

 private:
  kf_op op_{KF_SUM};
  std::vector<std::string> names_;  // of the groups
  std::vector<int64_t> group_of_;   // of each tensor, where there is more than one group
};

MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduce, KungFuAllReduce);
MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, KungFuAllReduceGradients, KungFuAllReduceGradients);

}  // namespace mindspore::kernel::kungfu
