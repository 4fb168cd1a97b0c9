// What the kernels of the collectives have in common on every device: the tensors of a call are grouped by dtype, and
// by size where a limit is set, and each group becomes one operation of the runtime, packed there without a flat copy.
#ifndef KUNGFU_KERNELS_COMMON_GROUPS_H_
#define KUNGFU_KERNELS_COMMON_GROUPS_H_

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "include/runtime/hardware_abstract/kernel_base/common_utils.h"
#include "include/runtime/hardware_abstract/kernel_base/kernel.h"
#include "kungfu/c_api.h"

// Inside MindSpore's namespace because its registration macros look names up from there.
namespace mindspore::kernel::kungfu {

using KernelTensors = std::vector<KernelTensor*>;

// Throws what the runtime said. MindSpore hands the text of a std::runtime_error to Python as it is; its own exceptions
// crash now and then when they are thrown from PyNative's queue, and a plain `return false` says nothing.
void Check(kf_status status);

// The number of elements.
uint64_t Count(const std::vector<int64_t>& shape);

kf_op ReduceOpOf(const PrimitivePtr& primitive);

// The number of ranks at present.
uint64_t ClusterSize();

// What becomes one operation.
struct Group {
  kf_dtype dtype;
  size_t part;                  // see Groups::Sort
  std::vector<size_t> indices;  // of its tensors among the call's
  std::vector<kf_tensor> tensors;
};

// In ascending order of parts, then of kf_dtype, then of the tensors: the same at all ranks.
class Groups {
 public:
  void Init(const PrimitivePtr& primitive);
  // Tensors of different parts are never in one group. With `copies` the elements may be of any type: nothing is
  // computed with them, and they travel as integers of their size.
  void Sort(const std::string& kernel, const KernelTensors& inputs, const KernelTensors& outputs, bool copies,
            const std::function<size_t(size_t)>& part_of);
  // The groups with the memory of this launch. `output_count`: elements that the output has to hold for so many of the
  // input, at the present size of the cluster.
  const std::vector<Group>& Bind(const std::string& kernel, const KernelTensors& inputs, const KernelTensors& outputs,
                                 bool in_place, const std::function<uint64_t(uint64_t)>& output_count);

  // Matches the operations with the other ranks'.
  const std::string& name() const { return name_; }
  // The shapes of all tensors of a part, for the check between ranks. With several groups in it each carries the whole
  // part's: a rank that brings another set of dtypes is then found out at the first group, before it goes on to
  // something else and leaves the others waiting for a later one.
  const char* Layout(const Group& group) const { return layouts_[group.part].c_str(); }

 private:
  std::string name_;
  // The most bytes of input that go into one operation, unless one tensor is larger; without a limit if negative.
  int64_t fusion_bytes_{-1};
  std::vector<Group> groups_;
  std::vector<std::string> layouts_;    // of each part
  std::vector<uint64_t> input_counts_;  // in what they travel as
  std::vector<uint64_t> output_counts_;
};

// One tensor or a tuple of tensors in, as many out, on top of the device's own base class. Not thread-safe: MindSpore
// launches a kernel from one thread at a time.
template <typename Base>
class CollectiveOn : public Base {
 public:
  using Group = kungfu::Group;
  using KernelTensors = kungfu::KernelTensors;

  bool Init(const KernelTensors&, const KernelTensors&) override {
    groups_.Init(this->primitive_);
    name_ = groups_.name();
    return true;
  }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    const int status = Base::Resize(inputs, outputs);
    groups_.Sort(this->kernel_name_, inputs, outputs, Copies(), [this](size_t i) { return PartOf(i); });
    return status;
  }
  std::vector<KernelAttr> GetOpSupport() override {
    // With a list of dtypes MindSpore would cast all tensors of a tuple to the dtype of the first, and back.
    return {KernelAttr().AddSkipCheckAttr(true).AddAllOutInRef(InPlace())};
  }

 protected:
  void LaunchGroups(const KernelTensors& inputs, const KernelTensors& outputs) {
    ranks_ = static_cast<uint32_t>(ClusterSize());
    Run(groups_.Bind(this->kernel_name_, inputs, outputs, InPlace(), [this](uint64_t n) { return OutputCount(n); }));
  }

  virtual void Run(const std::vector<Group>& groups) {
    for (const auto& group : groups) {
      Check(Run(group));
    }
  }
  // Runs one group, where the groups have nothing to do with each other.
  virtual kf_status Run(const Group& group) = 0;
  // Whether it computes nothing, so that the elements may be of any type.
  virtual bool Copies() const { return false; }
  // Tensors of different parts are never in one group.
  virtual size_t PartOf(size_t) const { return 0; }
  // How many elements the output has to hold for an input of `count` elements, at the present size of the cluster.
  virtual uint64_t OutputCount(uint64_t count) const { return count; }
  // Whether the outputs are the inputs, written in place.
  virtual bool InPlace() const { return false; }

  const char* Layout(const Group& group) const { return groups_.Layout(group); }

  std::string name_;   // matches the operation with the other ranks'
  uint32_t ranks_{1};  // as this launch began: what the outputs are held against, and the operation is for

 private:
  Groups groups_;
};

// A collective that reduces, by the primitive's attribute `op`.
template <typename Collective>
class Reducing : public Collective {
 public:
  using typename Collective::Group;
  using typename Collective::KernelTensors;

  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    op_ = ReduceOpOf(this->primitive_);
    return Collective::Init(inputs, outputs);
  }

 protected:
  kf_op op_{KF_SUM};
};

// The gradients of a step, in groups that are reduced one after another and, should a rank die meanwhile, with its part
// in all of them or in none.
template <typename Collective>
class ReducingGradients : public Reducing<Collective> {
 public:
  using typename Collective::Group;
  using typename Collective::KernelTensors;

  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    names_ = GetValue<std::vector<std::string>>(this->primitive_->GetAttr("names"));
    group_of_ = GetValue<std::vector<int64_t>>(this->primitive_->GetAttr("group_of"));
    if (names_.size() > 1 && group_of_.size() != inputs.size()) {
      throw std::runtime_error("InternalError: " + this->kernel_name_ + " was given " + std::to_string(inputs.size()) +
                               " tensors and groups for " + std::to_string(group_of_.size()));
    }
    return Reducing<Collective>::Init(inputs, outputs);
  }

 protected:
  virtual kf_status RunTogether(const std::vector<kf_group>& groups) = 0;

  void Run(const std::vector<Group>& groups) override {
    std::vector<kf_group> all;
    all.reserve(groups.size());
    for (const auto& group : groups) {
      all.push_back(
          {names_[group.part].c_str(), group.tensors.data(), group.tensors.size(), group.dtype, this->Layout(group)});
    }
    Check(RunTogether(all));
  }
  kf_status Run(const Group&) override { throw std::runtime_error("InternalError: groups are run together"); }
  size_t PartOf(size_t i) const override { return names_.size() > 1 ? static_cast<size_t>(group_of_[i]) : 0; }

 private:
  std::vector<std::string> names_;  // of the groups
  std::vector<int64_t> group_of_;   // of each tensor, where there is more than one group
};

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_COMMON_GROUPS_H_
