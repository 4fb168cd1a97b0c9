// MindSpore's kernels, the same on every device. What differs says `Device`: in cpu/plugin.cc, and in accelerator.h.
//
//   Kernel                      MindSpore's base class
//   kAllReduce, ...             the runtime's collectives for this device
//   Call                        calls one of them
//   PutTicket, TakeTicket, Wait for an all-reduce in two halves
//   Record                      tensors as the host reads and writes them
#ifndef KUNGFU_KERNELS_COMMON_KERNELS_H_
#define KUNGFU_KERNELS_COMMON_KERNELS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/groups.h"
#include "kungfu/store.h"

namespace mindspore::kernel::kungfu {

// ---- the collectives ----

// One tensor or a tuple of tensors in, as many out. Not thread-safe: MindSpore launches a kernel from one thread at a
// time.
template <typename Device>
class CollectiveOn : public Device::Kernel {
 public:
  bool Init(const KernelTensors&, const KernelTensors&) override {
    groups_.Init(this->primitive_);
    return true;
  }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    const int status = Device::Kernel::Resize(inputs, outputs);
    groups_.Sort(this->kernel_name_, inputs, outputs, Copies(), [this](size_t i) { return PartOf(i); });
    return status;
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void* stream) override {
    stream_ = stream;
    ranks_ = Ranks();
    Run(groups_.Bind(this->kernel_name_, inputs, outputs, InPlace(), ranks_,
                     [this](uint64_t n) { return OutputCount(n); }));
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override {
    // With a list of dtypes MindSpore would cast all tensors of a tuple to the dtype of the first, and back.
    return {KernelAttr().AddSkipCheckAttr(true).AddAllOutInRef(InPlace())};
  }

 protected:
  virtual void Run(const std::vector<Group>& groups) {
    for (const auto& group : groups) {
      Check(Run(group));
    }
  }
  // Runs one group, if the groups have nothing to do with each other.
  virtual kf_status Run(const Group& group) = 0;
  // Whether it computes nothing, so that the elements may be of any type.
  virtual bool Copies() const { return false; }
  // Tensors of different parts are never in one group.
  virtual size_t PartOf(size_t) const { return 0; }
  // How many elements the output has to hold for an input of `count` elements, at the present size of the cluster.
  virtual uint64_t OutputCount(uint64_t count) const { return count; }
  // How many the operation is among. To ask is to join the cluster, at a process that hasn't yet.
  virtual uint32_t Ranks() const { return ClusterSize(); }
  // Whether the outputs are the inputs, written in place.
  virtual bool InPlace() const { return false; }

  // Calls a function of the runtime with the group, and what else it takes.
  template <typename Function, typename... Rest>
  kf_status Bring(Function* function, const Group& group, Rest... rest) const {
    return Device::Call(function, stream_, groups_.name().c_str(), group.tensors.data(), group.tensors.size(),
                        group.dtype, rest...);
  }
  const char* Layout(const Group& group) const { return groups_.Layout(group); }
  const std::string& name() const { return groups_.name(); }

  void* stream_{nullptr};  // MindSpore's, for the length of a launch
  uint32_t ranks_{1};      // as this launch began: what the outputs are held against, and the operation is for

 private:
  Groups groups_;
};

// One that reduces, by the primitive's attribute `op`.
template <typename Device>
class Reducing : public CollectiveOn<Device> {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    op_ = ReduceOpOf(this->primitive_);
    return CollectiveOn<Device>::Init(inputs, outputs);
  }

 protected:
  kf_op op_{KF_SUM};
};

template <typename Device>
class AllReduce : public Reducing<Device> {
 protected:
  kf_status Run(const Group& group) override {
    return this->Bring(Device::kAllReduce, group, this->op_, this->Layout(group));
  }
};

// The gradients of a step, in groups that are reduced one after another. If a rank fails meanwhile, all groups have its
// contribution or none has.
template <typename Device>
class AllReduceGradients : public Reducing<Device> {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    names_ = GetValue<std::vector<std::string>>(this->primitive_->GetAttr("names"));
    group_of_ = GetValue<std::vector<int64_t>>(this->primitive_->GetAttr("group_of"));
    if (names_.size() > 1 && group_of_.size() != inputs.size()) {
      throw std::runtime_error("InternalError: " + this->kernel_name_ + " was given " + std::to_string(inputs.size()) +
                               " tensors and groups for " + std::to_string(group_of_.size()));
    }
    return Reducing<Device>::Init(inputs, outputs);
  }

 protected:
  void Run(const std::vector<Group>& groups) override {
    std::vector<kf_group> all;
    all.reserve(groups.size());
    for (const auto& group : groups) {
      all.push_back(
          {names_[group.part].c_str(), group.tensors.data(), group.tensors.size(), group.dtype, this->Layout(group)});
    }
    Check(Device::Call(Device::kAllReduceGradients, this->stream_, all.data(), all.size(), this->op_));
  }
  kf_status Run(const Group&) override { throw std::runtime_error("InternalError: groups are run together"); }
  size_t PartOf(size_t i) const override { return names_.size() > 1 ? static_cast<size_t>(group_of_[i]) : 0; }

 private:
  std::vector<std::string> names_;  // of the groups
  std::vector<int64_t> group_of_;   // of each tensor, if there is more than one group
};

template <typename Device>
class AllGather : public CollectiveOn<Device> {
 protected:
  kf_status Run(const Group& group) override {
    return this->Bring(Device::kAllGather, group, this->Layout(group), this->ranks_);
  }
  uint64_t OutputCount(uint64_t count) const override { return count * this->ranks_; }
  bool Copies() const override { return true; }
};

template <typename Device>
class ReduceScatter : public Reducing<Device> {
 protected:
  kf_status Run(const Group& group) override {
    return this->Bring(Device::kReduceScatter, group, this->op_, this->Layout(group), this->ranks_);
  }
  uint64_t OutputCount(uint64_t count) const override { return count / this->ranks_; }
};

template <typename Device>
class Broadcast : public CollectiveOn<Device> {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    root_ = static_cast<uint32_t>(GetValue<int64_t>(this->primitive_->GetAttr("root")));
    return CollectiveOn<Device>::Init(inputs, outputs);
  }

 protected:
  kf_status Run(const Group& group) override {
    return this->Bring(Device::kBroadcast, group, root_, this->Layout(group));
  }
  bool Copies() const override { return true; }

  uint32_t root_{0};
};

// Straight into parameters. On an ordinary tensor it would overwrite a value that may be used elsewhere.
template <typename Device>
class BroadcastInPlace : public Broadcast<Device> {
 protected:
  bool InPlace() const override { return true; }
};

// ---- an all-reduce in two halves, for what MindSpore does between them ----

// A tuple of tensors of one dtype in; as many out, which have no value before the wait, and the ticket, one uint64.
template <typename Device>
class AllReduceStart : public Reducing<Device> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs,
              void* stream) override {
    ticket_ = outputs.back();
    return Reducing<Device>::Launch(inputs, workspace, KernelTensors(outputs.begin(), outputs.end() - 1), stream);
  }

 protected:
  kf_status Run(const Group& group) override {
    uint64_t ticket = 0;
    // A rank that doesn't overlap brings another group under this name, perhaps one of the same tensors.
    const std::string layout = std::string(this->Layout(group)) + ", overlapping the backward pass";
    const kf_status status = this->Bring(Device::kStartAllReduce, group, this->op_, layout.c_str(), &ticket);
    if (status == KF_OK) {
      Device::PutTicket(*ticket_, ticket);
    }
    return status;
  }

 private:
  KernelTensor* ticket_{nullptr};  // for the length of a launch
};

// In: all results of the starts, all gradients that were started, the tickets. Out: the same, in place, the results
// with their values; the others only because MindSpore knows outputs in place for all inputs or for none.
//
// Being inputs here keeps the results alive until they are written. The gradients are inputs for the order of launches:
// MindSpore orders kernels by their distance from the graph's end, and a gradient that is near it is made, and its
// reduction started, before the backward pass goes on. Without that the last groups started a layer late.
template <typename Device>
class AllReduceWait : public Device::Kernel {
 public:
  bool Init(const KernelTensors&, const KernelTensors&) override {
    num_tensors_ = GetValue<std::vector<int64_t>>(this->primitive_->GetAttr("num_tensors"));
    return true;
  }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    const int status = Device::Kernel::Resize(inputs, outputs);
    counts_.clear();
    for (const auto n : num_tensors_) {
      for (int64_t i = 0; i < n; ++i) {
        counts_.push_back(Count(inputs[counts_.size()]->GetShapeVector()));
      }
    }
    return status;
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void*) override {
    std::vector<kf_tensor> tensors;
    tensors.reserve(counts_.size());
    for (size_t i = 0; i < counts_.size(); ++i) {
      if (outputs[i]->device_ptr() != inputs[i]->device_ptr()) {
        throw std::runtime_error("InternalError: " + this->kernel_name_ + " was not given its outputs in place");
      }
      tensors.push_back({nullptr, outputs[i]->device_ptr(), counts_[i]});
    }
    std::vector<kf_started> started;
    const kf_tensor* begin = tensors.data();
    for (size_t k = 0; k < num_tensors_.size(); ++k) {
      const auto count = static_cast<size_t>(num_tensors_[k]);
      started.push_back({Device::TakeTicket(*inputs[2 * counts_.size() + k]), begin, count});
      begin += count;
    }
    Check(Device::Wait(started));
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override { return {KernelAttr().AddSkipCheckAttr(true).AddAllOutInRef(true)}; }

 private:
  std::vector<int64_t> num_tensors_;  // of each start
  std::vector<uint64_t> counts_;      // of elements, of each tensor
};

// ---- the membership ----

// The wanted size in, (changed, detached) out.
template <typename Device>
class ResizeCluster : public Device::Kernel {
 public:
  bool Init(const KernelTensors&, const KernelTensors&) override { return true; }
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void* stream) override {
    record_.Lay(inputs, 1, 2 * sizeof(bool), stream);
    record_.Fetch(inputs);
    uint32_t size = 0;
    std::memcpy(&size, record_.blobs()[0].data, sizeof size);
    int changed = 0;
    int detached = 0;
    Check(kf_resize(size, &changed, &detached));
    record_.Write(*outputs[0], changed != 0);
    record_.Write(*outputs[1], detached != 0);
    record_.Finish();
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override {
    return {KernelAttr().AddInputAttr(kNumberTypeUInt32).AddOutputAttr(kNumberTypeBool).AddOutputAttr(kNumberTypeBool)};
  }

 private:
  typename Device::Record record_;
};

// Nothing in; N numbers of the cluster out, as they are when the kernel runs.
template <typename Device, size_t N>
class NumbersNow : public Device::Kernel {
 public:
  bool Init(const KernelTensors&, const KernelTensors&) override { return true; }
  bool Launch(const KernelTensors&, const KernelTensors&, const KernelTensors& outputs, void* stream) override {
    const std::array<int64_t, N> numbers = Ask();
    record_.Lay({}, 0, N * sizeof(int64_t), stream);
    for (size_t i = 0; i < N; ++i) record_.Write(*outputs[i], numbers[i]);
    record_.Finish();
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override {
    KernelAttr attr;
    for (size_t i = 0; i < N; ++i) attr.AddOutputAttr(kNumberTypeInt64);
    return {attr};
  }

 protected:
  virtual std::array<int64_t, N> Ask() = 0;

 private:
  typename Device::Record record_;
};

// The version in which the last all-reduce was, and how many took part: see kf_participants.
template <typename Device>
class ClusterNow : public NumbersNow<Device, 2> {
  std::array<int64_t, 2> Ask() override {
    uint64_t version = 0;
    uint32_t size = 0;
    Check(kf_participants(&size, &version));
    return {static_cast<int64_t>(version), size};
  }
};

// This process's rank and the number of ranks.
template <typename Device>
class Place : public NumbersNow<Device, 2> {
  std::array<int64_t, 2> Ask() override {
    uint32_t rank = 0;
    uint32_t size = 0;
    Check(kf_cluster(&rank, &size, nullptr));
    return {rank, size};
  }
};

// The number of ranks, once all of them are here.
template <typename Device>
class Barrier : public NumbersNow<Device, 1> {
  std::array<int64_t, 1> Ask() override {
    uint32_t size = 0;
    Check(kf_barrier("kungfu/barrier"));
    Check(kf_cluster(nullptr, &size, nullptr));
    return {size};
  }
};

// ---- the model store ----

// A tuple of tensors is one record, whose layout is a fingerprint of their dtypes and shapes.
template <typename Device>
class StoreOn : public Device::Kernel {
 public:
  bool Init(const KernelTensors&, const KernelTensors&) override {
    name_ = GetValue<std::string>(this->primitive_->GetAttr("record"));
    return true;
  }

  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    const int status = Device::Kernel::Resize(inputs, outputs);
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
  typename Device::Record record_;
};

// Parameters in, the version that they were saved as out.
template <typename Device>
class SaveModel : public StoreOn<Device> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void* stream) override {
    auto& record = this->record_;
    record.Lay(inputs, inputs.size(), sizeof(int64_t), stream);
    record.Fetch(inputs);
    uint64_t version = 0;
    Check(kf_save(this->name_.c_str(), this->layout_.c_str(), record.blobs().data(), record.blobs().size(), &version));
    record.Write(*outputs[0], static_cast<int64_t>(version));
    record.Finish();
    return true;
  }
};

// Parameters in; a neighbour's out, or these if no neighbour has any, and then the neighbour's rank and its version.
template <typename Device>
class RequestModel : public StoreOn<Device> {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    const auto& primitive = this->primitive_;
    const auto neighbour = GetValue<std::string>(primitive->GetAttr("neighbour"));
    neighbour_ = neighbour == "round-robin" ? KF_ROUND_ROBIN : KF_RANDOM;
    seed_ = static_cast<uint64_t>(GetValue<int64_t>(primitive->GetAttr("seed")));
    ahead_ = GetValue<bool>(primitive->GetAttr("prefetch"));
    return StoreOn<Device>::Init(inputs, outputs);
  }

  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    if (outputs.size() != inputs.size() + 1) {
      throw std::runtime_error("InternalError: " + this->kernel_name_ + " has " + std::to_string(inputs.size()) +
                               " inputs and " + std::to_string(outputs.size()) + " outputs");
    }
    return StoreOn<Device>::Resize(inputs, outputs);
  }

  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void* stream) override {
    struct {
      int64_t rank = -1;  // no rank has any
      uint64_t version = 0;
    } source;
    auto& record = this->record_;
    record.Lay(outputs, inputs.size(), sizeof source, stream);
    Check(kf_request_neighbour(this->name_.c_str(), this->layout_.c_str(), record.blobs().data(), record.blobs().size(),
                               neighbour_, seed_, ahead_, &source.rank, &source.version));
    if (source.rank >= 0) {
      record.Store(outputs);
    } else {
      record.Copy(outputs, inputs);
    }
    record.Write(*outputs.back(), source);
    record.Finish();
    return true;
  }

 private:
  kf_neighbour neighbour_{KF_RANDOM};
  uint64_t seed_{0};
  bool ahead_{true};
};

// ---- for MindSpore ----

template <typename Kernel, typename Factory>
void Add(Factory& factory, const char* name) {
  factory.Register(name, [] { return std::make_shared<Kernel>(); });
}

// Makes all kernels known to MindSpore's factory for the device, when the plugin is loaded.
template <typename Device, typename Factory>
bool AddAll(Factory& factory) {
  Add<AllReduce<Device>>(factory, "KungFuAllReduce");
  Add<AllReduceGradients<Device>>(factory, "KungFuAllReduceGradients");
  Add<AllGather<Device>>(factory, "KungFuAllGather");
  Add<ReduceScatter<Device>>(factory, "KungFuReduceScatter");
  Add<Broadcast<Device>>(factory, "KungFuBroadcast");
  Add<BroadcastInPlace<Device>>(factory, "KungFuBroadcastInPlace");
  Add<AllReduceStart<Device>>(factory, "KungFuAllReduceStart");
  Add<AllReduceWait<Device>>(factory, "KungFuAllReduceWait");
  Add<ResizeCluster<Device>>(factory, "KungFuResize");
  Add<ClusterNow<Device>>(factory, "KungFuCluster");
  Add<Place<Device>>(factory, "KungFuPlace");
  Add<Barrier<Device>>(factory, "KungFuBarrier");
  Add<SaveModel<Device>>(factory, "KungFuSaveModel");
  Add<RequestModel<Device>>(factory, "KungFuRequestModel");
  return true;
}

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_COMMON_KERNELS_H_
