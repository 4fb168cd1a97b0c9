// Code shared by the GPU kernels and the Ascend kernels (see kernels.h). These kernels call the
// device layer.
#ifndef KUNGFU_KERNELS_COMMON_ACCELERATOR_H_
#define KUNGFU_KERNELS_COMMON_ACCELERATOR_H_

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "common/groups.h"
#include "kungfu/device.h"
#include "kungfu/store.h"

namespace mindspore::kernel::kungfu {

// Maps the address of a ticket tensor to the ticket of a started all-reduce. Neither the start
// kernel nor the wait kernel reads or writes the tensor, because the tensor is in device memory.
// The host could read the tensor only after waiting for the stream, which includes the backward
// pass. The wait kernel finds its start kernel by the tensor's address.
class Tickets {
 public:
  static Tickets& Get() {
    static auto* const tickets = new Tickets;  // MindSpore's threads may outlive static destructors
    return *tickets;
  }
  void Put(const void* address, uint64_t ticket) {
    std::lock_guard<std::mutex> guard(mutex_);
    tickets_[address] = ticket;  // replaces a ticket that no caller has waited for
  }
  uint64_t Take(const void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = tickets_.find(address);
    if (found == tickets_.end()) {
      throw std::runtime_error("InternalError: no started all-reduce belongs to this wait");
    }
    const auto ticket = found->second;
    tickets_.erase(found);
    return ticket;
  }

 private:
  std::mutex mutex_;
  std::map<const void*, uint64_t> tickets_;
};

// Stores tensors in pinned memory, followed by space for values that the kernel computes. A launch
// waits until its copies have ended, because the next launch reuses the memory.
class PinnedRecord {
 public:
  PinnedRecord() = default;
  PinnedRecord(const PinnedRecord&) = delete;
  PinnedRecord& operator=(const PinnedRecord&) = delete;
  ~PinnedRecord() { Free(); }

  // Reserves memory for the first `count` tensors, followed by `room` bytes for the values that
  // `Write` copies.
  void Lay(const KernelTensors& tensors, size_t count, uint64_t room, void* stream) {
    stream_ = stream;
    uint64_t bytes = room;
    for (size_t i = 0; i < count; ++i) {
      bytes += tensors[i]->size();
    }
    if (bytes > bytes_) {
      Free();
      Check(kf_device_malloc_host(&memory_, bytes));
      bytes_ = bytes;
    }
    rest_ = static_cast<char*>(memory_);
    blobs_.clear();
    for (size_t i = 0; i < count; ++i) {
      blobs_.push_back({rest_, tensors[i]->size()});
      rest_ += tensors[i]->size();
    }
  }
  const std::vector<kf_blob>& blobs() const { return blobs_; }

  void Fetch(const KernelTensors& tensors) {
    for (size_t i = 0; i < blobs_.size(); ++i) {
      Check(kf_device_copy(blobs_[i].data, tensors[i]->device_ptr(), blobs_[i].nbytes, KF_DEVICE_TO_HOST, stream_));
    }
    Finish();
  }
  void Store(const KernelTensors& tensors) {
    for (size_t i = 0; i < blobs_.size(); ++i) {
      Check(kf_device_copy(tensors[i]->device_ptr(), blobs_[i].data, blobs_[i].nbytes, KF_HOST_TO_DEVICE, stream_));
    }
  }
  void Copy(const KernelTensors& to, const KernelTensors& from) {
    for (size_t i = 0; i < from.size(); ++i) {
      Check(kf_device_copy(to[i]->device_ptr(), from[i]->device_ptr(), from[i]->size(), KF_DEVICE_TO_DEVICE, stream_));
    }
  }
  // Copies `value` to the reserved space, and from there to the tensor on the device.
  template <typename Value>
  void Write(const KernelTensor& tensor, const Value& value) {
    std::memcpy(rest_, &value, sizeof value);
    Check(kf_device_copy(tensor.device_ptr(), rest_, sizeof value, KF_HOST_TO_DEVICE, stream_));
    rest_ += sizeof value;
  }
  void Finish() { Check(kf_stream_synchronize(stream_)); }

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
  char* rest_{nullptr};  // the next free byte after the tensors
  std::vector<kf_blob> blobs_;
  kf_stream stream_{nullptr};
};

template <typename Base>
struct Accelerator {
  using Kernel = Base;
  using Record = PinnedRecord;

  static constexpr auto kAllReduce = &kf_device_all_reduce;
  static constexpr auto kAllReduceGradients = &kf_device_all_reduce_gradients;
  static constexpr auto kAllGather = &kf_device_all_gather;
  static constexpr auto kReduceScatter = &kf_device_reduce_scatter;
  static constexpr auto kBroadcast = &kf_device_broadcast;
  static kf_status kStartAllReduce(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                                   kf_op op, const char* layout, uint64_t* ticket, kf_stream stream) {
    return kf_device_start_all_reduce(name, tensors, num_tensors, dtype, op, layout, stream, ticket);
  }
  template <typename Function, typename... Args>
  static kf_status Call(Function* function, kf_stream stream, Args... args) {
    return function(args..., stream);
  }

  static void PutTicket(const KernelTensor& tensor, uint64_t ticket) {
    Tickets::Get().Put(tensor.device_ptr(), ticket);
  }
  static uint64_t TakeTicket(const KernelTensor& tensor) { return Tickets::Get().Take(tensor.device_ptr()); }
  static kf_status Wait(const std::vector<kf_started>& started) {
    std::vector<uint64_t> tickets;
    for (const auto& each : started) {
      tickets.push_back(each.ticket);
    }
    return kf_device_wait(tickets.data(), tickets.size());
  }
};

// Returns the kernel that MindSpore's factory creates for `name`, or null if the factory has no
// kernel with this name. The kernel is never destroyed. Only tests call this function.
template <typename Factory>
KernelMod* MakeForTests(Factory& factory, const char* name) {
  static auto* const kernels = new std::vector<std::shared_ptr<KernelMod>>;
  kernels->push_back(factory.Create(name));
  return kernels->back().get();
}

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_COMMON_ACCELERATOR_H_
