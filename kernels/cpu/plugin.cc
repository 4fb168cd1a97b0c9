// The plugin for CPUs, where kernels are launched without a stream and the tensors are in the host's memory.
#include <cstring>
#include <vector>

#include "common/kernels.h"
#include "mindspore/ops/kernel/cpu/cpu_kernel.h"

extern "C" __attribute__((visibility("default"))) const char* kungfu_ms_version() { return KUNGFU_MINDSPORE_VERSION; }

namespace mindspore::kernel::kungfu {
namespace {

class HostKernel : public NativeCpuKernelMod {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs) override {
    return Launch(inputs, workspace, outputs, nullptr);
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs,
              void* stream) override = 0;
};

// The tensors' own memory.
class HostRecord {
 public:
  void Lay(const KernelTensors& tensors, size_t count, uint64_t, void*) {
    blobs_.clear();
    for (size_t i = 0; i < count; ++i) {
      blobs_.push_back({tensors[i]->device_ptr(), tensors[i]->size()});
    }
  }
  const std::vector<kf_blob>& blobs() const { return blobs_; }

  void Fetch(const KernelTensors&) {}
  void Store(const KernelTensors&) {}
  void Copy(const KernelTensors& to, const KernelTensors& from) {
    for (size_t i = 0; i < from.size(); ++i) {
      std::memcpy(to[i]->device_ptr(), from[i]->device_ptr(), from[i]->size());
    }
  }
  template <typename Value>
  void Write(const KernelTensor& tensor, const Value& value) {
    std::memcpy(tensor.device_ptr(), &value, sizeof value);
  }
  void Finish() {}

 private:
  std::vector<kf_blob> blobs_;
};

struct Host {
  using Kernel = HostKernel;
  using Record = HostRecord;

  static constexpr auto kAllReduce = &kf_all_reduce;
  static constexpr auto kAllReduceGradients = &kf_all_reduce_gradients;
  static constexpr auto kAllGather = &kf_all_gather;
  static constexpr auto kReduceScatter = &kf_reduce_scatter;
  static constexpr auto kBroadcast = &kf_broadcast;
  static constexpr auto kStartAllReduce = &kf_start_all_reduce;
  template <typename Function, typename... Args>
  static kf_status Call(Function* function, void*, Args... args) {
    return function(args...);
  }

  static void PutTicket(const KernelTensor& tensor, uint64_t ticket) {
    *static_cast<uint64_t*>(tensor.device_ptr()) = ticket;
  }
  static uint64_t TakeTicket(const KernelTensor& tensor) { return *static_cast<const uint64_t*>(tensor.device_ptr()); }
  static kf_status Wait(const std::vector<kf_started>& started) { return kf_wait(started.data(), started.size()); }
};

// The gradients of a shard in; as many out, which have a value where the last output, one bool, says that the step is
// over. On CPUs only: sums are kept in the host's memory from launch to launch.
class SumShards : public CollectiveOn<Host> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs,
              void* stream) override {
    over_ = static_cast<bool*>(outputs.back()->device_ptr());
    return CollectiveOn<Host>::Launch(inputs, workspace, {outputs.begin(), outputs.end() - 1}, stream);
  }

 protected:
  void Run(const std::vector<Group>& groups) override {
    std::vector<kf_group> all;
    all.reserve(groups.size());
    for (const auto& group : groups) {
      all.push_back({"kungfu/shards", group.tensors.data(), group.tensors.size(), group.dtype, Layout(group)});
    }
    int over = 0;
    Check(kf_sum_shards(all.data(), all.size(), &over));
    *over_ = over != 0;
  }
  kf_status Run(const Group&) override { throw std::runtime_error("InternalError: groups are summed together"); }

 private:
  bool* over_{nullptr};  // MindSpore's, for the length of a launch
};

bool AddShards(Factory<NativeCpuKernelMod>& factory) {
  Add<SumShards>(factory, "KungFuSumShards");
  return true;
}

[[maybe_unused]] const bool added =
    AddAll<Host>(Factory<NativeCpuKernelMod>::Instance()) && AddShards(Factory<NativeCpuKernelMod>::Instance());

}  // namespace
}  // namespace mindspore::kernel::kungfu
