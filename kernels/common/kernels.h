// The kernels for MindSpore. The template argument `Device` supplies what differs between devices.
// cpu/plugin.cc defines one `Device`, and accelerator.h another one. A `Device` has these members:
//
//   Kernel                       MindSpore's base class for kernels
//   kAllReduce, ...              the runtime's collectives for this device
//   Call                         calls one of these collectives
//   PutTicket, TakeTicket, Wait  support an all-reduce that is split into start and wait
//   Record                       stores tensors in a form that the host can read and write
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

// The input is one tensor or a tuple of tensors. The output has the same number of tensors. A
// kernel isn't thread-safe: MindSpore launches it from only one thread at a time.
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
    // The kernel doesn't list its dtypes. If it did, MindSpore would cast all tensors of a tuple to
    // the first tensor's dtype, and cast the results back.
    return {KernelAttr().AddSkipCheckAttr(true).AddAllOutInRef(InPlace())};
  }

 protected:
  virtual void Run(const std::vector<Group>& groups) {
    for (const auto& group : groups) {
      Check(Run(group));
    }
  }
  // Runs the operation for one group. The base class calls this function for each group if the
  // groups are independent of each other.
  virtual kf_status Run(const Group& group) = 0;
  // Returns true if the operation only copies elements. The elements may then have any dtype.
  virtual bool Copies() const { return false; }
  // Returns the part to which tensor number `i` belongs. Tensors of different parts are never in
  // one group.
  virtual size_t PartOf(size_t) const { return 0; }
  // Returns the number of elements that the output must hold at the current cluster size if the
  // input has `count` elements.
  virtual uint64_t OutputCount(uint64_t count) const { return count; }
  // Returns the number of ranks that run the operation. If this process hasn't joined the cluster
  // yet, it joins now.
  virtual uint32_t Ranks() const { return ClusterSize(); }
  // Returns true if the kernel writes its outputs into its inputs' memory.
  virtual bool InPlace() const { return false; }

  // Calls the runtime's `function` with the group and the arguments in `rest`.
  template <typename Function, typename... Rest>
  kf_status Bring(Function* function, const Group& group, Rest... rest) const {
    return Device::Call(function, stream_, groups_.name().c_str(), group.tensors.data(), group.tensors.size(),
                        group.dtype, rest...);
  }
  const char* Layout(const Group& group) const { return groups_.Layout(group); }
  const std::string& name() const { return groups_.name(); }

  void* stream_{nullptr};  // MindSpore's stream, valid during a launch
  uint32_t ranks_{1};      // the number of ranks when this launch began; the output sizes must match this number

 private:
  Groups groups_;
};

// The base class for collectives that reduce. The primitive's attribute `op` chooses the reduction.
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

// All-reduces the gradients of a step, one group after another. If a rank fails during the launch,
// its contribution is either in all groups or in none.
template <typename Device>
class AllReduceGradients : public Reducing<Device> {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    names_ = GetValue<std::vector<std::string>>(this->primitive_->GetAttr("names"));
    group_of_ = GetValue<std::vector<int64_t>>(this->primitive_->GetAttr("group_of"));
    if (names_.size() > 1 && group_of_.size() != inputs.size()) {
      throw std::runtime_error("InternalError: " + this->kernel_name_ + " has " + std::to_string(inputs.size()) +
                               " tensors, but group_of has " + std::to_string(group_of_.size()) + " entries");
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
  kf_status Run(const Group&) override {
    throw std::runtime_error("InternalError: this kernel runs all groups in one call");
  }
  size_t PartOf(size_t i) const override { return names_.size() > 1 ? static_cast<size_t>(group_of_[i]) : 0; }

 private:
  std::vector<std::string> names_;  // one name for each group
  std::vector<int64_t> group_of_;   // for each tensor, the number of its group; empty if there is only one group
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

// Broadcasts parameters in place. Don't use it for ordinary tensors, because other code may still
// need their old values.
template <typename Device>
class BroadcastInPlace : public Broadcast<Device> {
 protected:
  bool InPlace() const override { return true; }
};

// ---- an all-reduce split into start and wait; MindSpore runs other kernels in between ----

// The input is a tuple of tensors that all have the same dtype. The outputs are one tensor for each
// input, and the ticket (one uint64). The contents of the output tensors are undefined before the
// wait.
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
    // Another rank may run this all-reduce without overlap. The added text lets the consistency
    // check detect that rank.
    const std::string layout = std::string(this->Layout(group)) + ", overlapping the backward pass";
    const kf_status status = this->Bring(Device::kStartAllReduce, group, this->op_, layout.c_str(), &ticket);
    if (status == KF_OK) {
      Device::PutTicket(*ticket_, ticket);
    }
    return status;
  }

 private:
  KernelTensor* ticket_{nullptr};  // valid during a launch
};

// Waits for started all-reduces. Inputs: the result tensors of all start kernels, all gradients
// that these kernels reduce, and the tickets. Outputs: the same tensors, in place. Only the result
// tensors receive values. The other tensors are outputs because MindSpore supports in-place outputs
// only for all inputs or for none.
//
// The result tensors are inputs so that MindSpore keeps them alive until they are written. The
// gradients are inputs because MindSpore's launch order depends on a kernel's distance from the end
// of the graph. With these inputs, a gradient near the end of the graph is computed, and its
// reduction starts, before the backward pass continues. Without these inputs, the reduction of the
// last groups would start only after one more layer.
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
        throw std::runtime_error("InternalError: " + this->kernel_name_ +
                                 ": an output doesn't use the memory of its input");
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
  std::vector<int64_t> num_tensors_;  // number of tensors of each start kernel
  std::vector<uint64_t> counts_;      // number of elements in each tensor
};

// ---- the membership ----

// Input: the desired size. Outputs: whether the cluster has changed, and whether this process is
// detached.
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

// No inputs. Outputs: N numbers that describe the cluster at the time of the launch.
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

// Outputs the cluster version that the last all-reduce used, and the number of ranks that
// contributed to it. See kf_participants.
template <typename Device>
class ClusterNow : public NumbersNow<Device, 2> {
  std::array<int64_t, 2> Ask() override {
    uint64_t version = 0;
    uint32_t size = 0;
    Check(kf_participants(&size, &version));
    return {static_cast<int64_t>(version), size};
  }
};

// Outputs this process's rank and the number of ranks.
template <typename Device>
class Place : public NumbersNow<Device, 2> {
  std::array<int64_t, 2> Ask() override {
    uint32_t rank = 0;
    uint32_t size = 0;
    Check(kf_cluster(&rank, &size, nullptr));
    return {rank, size};
  }
};

// Waits until all ranks have called the barrier, then outputs the number of ranks.
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

// The base class for kernels of the model store. It saves a tuple of tensors as one record. The
// record's layout is a hash of the tensors' dtypes and shapes.
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
    // The hash is FNV-1a, which gives the same value in every process.
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

// Inputs: the parameters. Output: the version of the saved model.
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

// Inputs: this worker's parameters. Outputs: a neighbour's parameters, then the neighbour's rank
// and the version of its saved model. If no neighbour has saved a model, the kernel outputs this
// worker's own parameters.
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
      int64_t rank = -1;  // no other rank has saved a model
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

// Registers all kernels for `Device` in MindSpore's factory. Called when the plugin is loaded.
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
