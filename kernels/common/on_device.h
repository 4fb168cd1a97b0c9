// The kernels of a GPU and of an Ascend device, on top of that device's Collective: they differ in how MindSpore finds
// them. What they do is in the device layer.
#ifndef KUNGFU_KERNELS_COMMON_ON_DEVICE_H_
#define KUNGFU_KERNELS_COMMON_ON_DEVICE_H_

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/groups.h"
#include "kungfu/device.h"

namespace mindspore::kernel::kungfu {

// MindSpore's stream, and pinned memory for the few words that a kernel reads or writes itself.
template <typename Base>
class CollectiveOnDevice : public CollectiveOn<Base> {
 public:
  using typename CollectiveOn<Base>::KernelTensors;

  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void* stream) override {
    stream_ = stream;
    this->LaunchGroups(inputs, outputs);
    return true;
  }

 protected:
  kf_stream stream_{nullptr};  // MindSpore's, for the length of a launch
};

template <typename Collective>
class AllReduceOn : public Reducing<Collective> {
 protected:
  using typename Collective::Group;
  kf_status Run(const Group& group) override {
    return kf_device_all_reduce(this->name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype, this->op_,
                                this->Layout(group), this->stream_);
  }
};

template <typename Collective>
class AllReduceGradientsOn : public ReducingGradients<Collective> {
 protected:
  kf_status RunTogether(const std::vector<kf_group>& groups) override {
    return kf_device_all_reduce_gradients(groups.data(), groups.size(), this->op_, this->stream_);
  }
};

template <typename Collective>
class AllGatherOn : public Collective {
 protected:
  using typename Collective::Group;
  kf_status Run(const Group& group) override {
    return kf_device_all_gather(this->name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype,
                                this->Layout(group), this->stream_);
  }
  uint64_t OutputCount(uint64_t count) const override { return count * kf_size(); }
};

template <typename Collective>
class ReduceScatterOn : public Reducing<Collective> {
 protected:
  using typename Collective::Group;
  kf_status Run(const Group& group) override {
    return kf_device_reduce_scatter(this->name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype,
                                    this->op_, this->Layout(group), this->stream_);
  }
  uint64_t OutputCount(uint64_t count) const override { return count / kf_size(); }
};

template <typename Collective>
class BroadcastOn : public Collective {
 public:
  using typename Collective::Group;
  using typename Collective::KernelTensors;

  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    root_ = static_cast<uint32_t>(GetValue<int64_t>(this->primitive_->GetAttr("root")));
    return Collective::Init(inputs, outputs);
  }

 protected:
  kf_status Run(const Group& group) override {
    return kf_device_broadcast(this->name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype, root_,
                               this->Layout(group), this->stream_);
  }

 private:
  uint32_t root_{0};
};

// Straight into parameters, in the device's memory. On an ordinary tensor it would overwrite a value that may be used
// elsewhere.
template <typename Collective>
class BroadcastInPlaceOn : public BroadcastOn<Collective> {
 protected:
  bool InPlace() const override { return true; }
};

// ---- an all-reduce in two halves ----

// The ticket is a tensor in the device's memory, which neither half reads or writes: to fetch it the host would have to
// wait for the stream, and with it for the backward pass. Its address tells which start a wait belongs to.
class Tickets {
 public:
  static Tickets& Get() {
    static auto* const tickets = new Tickets;  // MindSpore's threads may outlive static destructors
    return *tickets;
  }
  void Put(const void* address, uint64_t ticket) {
    std::lock_guard<std::mutex> guard(mutex_);
    tickets_[address] = ticket;  // in the place of one that nobody has waited for
  }
  uint64_t Take(const void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = tickets_.find(address);
    if (found == tickets_.end()) {
      throw std::runtime_error("InternalError: a reduction is waited for that was never started");
    }
    const auto ticket = found->second;
    tickets_.erase(found);
    return ticket;
  }

 private:
  std::mutex mutex_;
  std::map<const void*, uint64_t> tickets_;
};

template <typename Collective>
class AllReduceStartOn : public Reducing<Collective> {
 public:
  using typename Collective::Group;
  using typename Collective::KernelTensors;

  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs,
              void* stream) override {
    ticket_address_ = outputs.back()->device_ptr();
    return Collective::Launch(inputs, workspace, KernelTensors(outputs.begin(), outputs.end() - 1), stream);
  }

 protected:
  kf_status Run(const Group& group) override {
    uint64_t ticket = 0;
    const kf_status status =
        kf_device_start_all_reduce(this->name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype,
                                   this->op_, this->Layout(group), this->stream_, &ticket);
    if (status == KF_OK) {
      Tickets::Get().Put(ticket_address_, ticket);
    }
    return status;
  }

 private:
  const void* ticket_address_{nullptr};
};

// In and out: see kernels/cpu/overlap.cc.
template <typename Base>
class AllReduceWaitOn : public Base {
 public:
  bool Init(const KernelTensors&, const KernelTensors&) override {
    num_starts_ = GetValue<std::vector<int64_t>>(this->primitive_->GetAttr("num_tensors")).size();
    return true;
  }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    return Base::Resize(inputs, outputs);
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void*) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i]->device_ptr() != inputs[i]->device_ptr()) {
        throw std::runtime_error("InternalError: " + this->kernel_name_ + " was not given its outputs in place");
      }
    }
    std::vector<uint64_t> tickets;
    for (size_t i = inputs.size() - num_starts_; i < inputs.size(); ++i) {
      tickets.push_back(Tickets::Get().Take(inputs[i]->device_ptr()));
    }
    Check(kf_device_wait(tickets.data(), tickets.size()));
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override { return {KernelAttr().AddSkipCheckAttr(true).AddAllOutInRef(true)}; }

 private:
  size_t num_starts_{0};
};

// ---- the membership ----

// A kernel that reads or writes a few words itself, by way of pinned memory.
template <typename Base>
class WordsOn : public Base {
 public:
  ~WordsOn() override {
    if (words_ != nullptr) {
      kf_device_free_host(words_);
    }
  }
  bool Init(const KernelTensors&, const KernelTensors&) override { return true; }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    return Base::Resize(inputs, outputs);
  }

 protected:
  char* Words() {
    if (words_ == nullptr) {
      Check(kf_device_malloc_host(&words_, kBytes));
    }
    return static_cast<char*>(words_);
  }
  void Read(const KernelTensor& tensor, char* word, uint64_t bytes, void* stream) {
    Check(kf_device_copy(word, tensor.device_ptr(), bytes, KF_DEVICE_TO_HOST, stream));
    Check(kf_stream_synchronize(stream));
  }
  // `bytes` from the beginning of the words into the one tensor, and as many behind them into the other.
  void Write(const KernelTensor& first, const KernelTensor& second, uint64_t bytes, void* stream) {
    Check(kf_device_copy(first.device_ptr(), Words(), bytes, KF_HOST_TO_DEVICE, stream));
    Check(kf_device_copy(second.device_ptr(), Words() + bytes, bytes, KF_HOST_TO_DEVICE, stream));
    Check(kf_stream_synchronize(stream));  // the words are used again
  }

 private:
  static constexpr uint64_t kBytes = 16;
  void* words_{nullptr};  // pinned
};

// The wanted size in, (changed, detached) out, all in the device's memory.
template <typename Base>
class ResizeOn : public WordsOn<Base> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void* stream) override {
    char* words = this->Words();
    this->Read(*inputs[0], words, sizeof(uint32_t), stream);
    uint32_t size = 0;
    std::memcpy(&size, words, sizeof size);
    int changed = 0;
    int detached = 0;
    Check(kf_resize(size, &changed, &detached));
    words[0] = changed != 0;
    words[1] = detached != 0;
    this->Write(*outputs[0], *outputs[1], 1, stream);
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override {
    return {KernelAttr().AddInputAttr(kNumberTypeUInt32).AddOutputAttr(kNumberTypeBool).AddOutputAttr(kNumberTypeBool)};
  }
};

// Nothing in; the cluster's version and its size at the time of the launch out.
template <typename Base>
class ClusterOn : public WordsOn<Base> {
 public:
  bool Launch(const KernelTensors&, const KernelTensors&, const KernelTensors& outputs, void* stream) override {
    const int64_t words[] = {static_cast<int64_t>(kf_cluster_version()), static_cast<int64_t>(kf_size())};
    std::memcpy(this->Words(), words, sizeof words);
    this->Write(*outputs[0], *outputs[1], sizeof words[0], stream);
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override {
    return {KernelAttr().AddOutputAttr(kNumberTypeInt64).AddOutputAttr(kNumberTypeInt64)};
  }
};

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_COMMON_ON_DEVICE_H_
