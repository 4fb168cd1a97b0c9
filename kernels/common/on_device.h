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
#include "common/store.h"
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
                                this->Layout(group), this->ranks_, this->stream_);
  }
  uint64_t OutputCount(uint64_t count) const override { return count * this->ranks_; }
  bool Copies() const override { return true; }
};

template <typename Collective>
class ReduceScatterOn : public Reducing<Collective> {
 protected:
  using typename Collective::Group;
  kf_status Run(const Group& group) override {
    return kf_device_reduce_scatter(this->name_.c_str(), group.tensors.data(), group.tensors.size(), group.dtype,
                                    this->op_, this->Layout(group), this->ranks_, this->stream_);
  }
  uint64_t OutputCount(uint64_t count) const override { return count / this->ranks_; }
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
  bool Copies() const override { return true; }

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

// Pinned memory of the host, made when it is first asked for.
class Pinned {
 public:
  Pinned() = default;
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned() { Free(); }
  // At least so many bytes; what was in them may be gone where they are more than before.
  char* Get(uint64_t bytes) {
    if (bytes > bytes_) {
      Free();
      Check(kf_device_malloc_host(&memory_, bytes));
      bytes_ = bytes;
    }
    return static_cast<char*>(memory_);
  }

 private:
  void Free() {
    if (memory_ != nullptr) {
      kf_device_free_host(memory_);
    }
    memory_ = nullptr;
    bytes_ = 0;
  }
  void* memory_{nullptr};
  uint64_t bytes_{0};
};

// A kernel that reads or writes a few words itself, by way of pinned memory.
template <typename Base>
class WordsOn : public Base {
 public:
  bool Init(const KernelTensors&, const KernelTensors&) override { return true; }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    return Base::Resize(inputs, outputs);
  }

 protected:
  char* Words() { return words_.Get(16); }
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
  Pinned words_;
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
    uint64_t version = 0;
    uint32_t size = 0;
    Check(kf_participants(&size, &version));
    const int64_t words[] = {static_cast<int64_t>(version), static_cast<int64_t>(size)};
    std::memcpy(this->Words(), words, sizeof words);
    this->Write(*outputs[0], *outputs[1], sizeof words[0], stream);
    return true;
  }
  std::vector<KernelAttr> GetOpSupport() override {
    return {KernelAttr().AddOutputAttr(kNumberTypeInt64).AddOutputAttr(kNumberTypeInt64)};
  }
};

// ---- the model store ----

// A record in pinned memory, one tensor behind another, and then room for what the kernel gives out itself. A launch
// ends when its copies have, as the next one uses the memory again.
class PinnedRecord {
 public:
  // `room`: bytes behind the tensors.
  void Lay(const KernelTensors& tensors, size_t count, uint64_t room) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      bytes += tensors[i]->size();
    }
    char* next = memory_.Get(bytes + room);
    blobs_.clear();
    for (size_t i = 0; i < count; ++i) {
      blobs_.push_back({next, tensors[i]->size()});
      next += tensors[i]->size();
    }
    rest_ = next;
  }
  const std::vector<kf_blob>& blobs() const { return blobs_; }

  void CopyFrom(const KernelTensors& tensors, void* stream) {
    for (size_t i = 0; i < blobs_.size(); ++i) {
      Check(kf_device_copy(blobs_[i].data, tensors[i]->device_ptr(), blobs_[i].nbytes, KF_DEVICE_TO_HOST, stream));
    }
  }
  void CopyTo(const KernelTensors& tensors, void* stream) const {
    for (size_t i = 0; i < blobs_.size(); ++i) {
      Check(kf_device_copy(tensors[i]->device_ptr(), blobs_[i].data, blobs_[i].nbytes, KF_HOST_TO_DEVICE, stream));
    }
  }
  // By way of the room.
  template <typename Value>
  void Write(const KernelTensor& tensor, const Value& value, void* stream) {
    std::memcpy(rest_, &value, sizeof value);
    Check(kf_device_copy(tensor.device_ptr(), rest_, sizeof value, KF_HOST_TO_DEVICE, stream));
  }

 private:
  Pinned memory_;
  std::vector<kf_blob> blobs_;
  char* rest_{nullptr};
};

template <typename Base>
class SaveModelOn : public SavingOn<Base> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void* stream) override {
    record_.Lay(inputs, inputs.size(), sizeof(int64_t));
    record_.CopyFrom(inputs, stream);
    Check(kf_stream_synchronize(stream));
    record_.Write(*outputs[0], this->Save(record_.blobs()), stream);
    Check(kf_stream_synchronize(stream));
    return true;
  }

 private:
  PinnedRecord record_;
};

template <typename Base>
class RequestModelOn : public RequestingOn<Base> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void* stream) override {
    record_.Lay(inputs, inputs.size(), sizeof(typename RequestingOn<Base>::Source));
    const auto source = this->Request(record_.blobs());
    if (source.rank >= 0) {
      record_.CopyTo(outputs, stream);
    } else {
      for (size_t i = 0; i < inputs.size(); ++i) {
        Check(kf_device_copy(outputs[i]->device_ptr(), inputs[i]->device_ptr(), inputs[i]->size(), KF_DEVICE_TO_DEVICE,
                             stream));
      }
    }
    record_.Write(*outputs.back(), source, stream);
    Check(kf_stream_synchronize(stream));
    return true;
  }

 private:
  PinnedRecord record_;
};

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_COMMON_ON_DEVICE_H_
