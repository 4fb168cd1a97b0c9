// The MindSpore plugin for CPUs. MindSpore launches its kernels without a stream, and keeps tensors
// in the host's memory.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>
#include <vector>

#include "base/bfloat16.h"
#include "base/float16.h"
#include "common/kernels.h"
#include "cpu/denormals.h"
#include "cpu/philox.h"
#include "cpu/undivided.h"
#include "mindspore/ops/kernel/cpu/cpu_kernel.h"

extern "C" __attribute__((visibility("default"))) const char* kungfu_ms_version() { return KUNGFU_MINDSPORE_VERSION; }

// Calls `ComputeUndivided` (cpu/undivided.h). Returns 0, or 1 on failure.
extern "C" __attribute__((visibility("default"))) int kungfu_ms_compute_undivided() {
  try {
    return mindspore::kernel::kungfu::ComputeUndivided() ? 0 : 1;
  } catch (const std::exception&) {
    return 1;
  }
}

// Calls `FlushDenormalsOfQueues` (cpu/denormals.h). Returns 0, or 1 on failure.
extern "C" __attribute__((visibility("default"))) int kungfu_ms_flush_denormals_of_queues() {
  try {
    mindspore::kernel::kungfu::FlushDenormalsOfQueues();
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

namespace mindspore::kernel::kungfu {
namespace {

std::atomic<int (*)()> takes_part{nullptr};
std::atomic<int (*)(int, const uint8_t*, int)> who_plays{nullptr};

bool TakesPart() {
  auto* const ask = takes_part.load();
  return ask == nullptr || ask() != 0;
}

class HostKernel : public NativeCpuKernelMod {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs) override {
    return Launch(inputs, workspace, outputs, nullptr);
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs,
              void* stream) override = 0;
};

// The `Record` for CPUs, which uses the tensors' own memory instead of a copy.
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

// Inputs: the gradients of a shard, followed by the shard's loss. Outputs: the same number of
// tensors, followed by one bool, which is true if the step has ended. The output tensors are valid
// only if the bool is true. This kernel exists only on CPUs, because the sums stay in the host's
// memory between launches.
class SumShards : public CollectiveOn<Host> {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs,
              void* stream) override {
    over_ = static_cast<bool*>(outputs.back()->device_ptr());
    loss_ = inputs.back()->device_ptr();
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
    Check(kf_sum_shards(all.data(), all.size(), loss_, &over));
    *over_ = over != 0;
  }
  kf_status Run(const Group&) override {
    throw std::runtime_error("InternalError: this kernel sums all groups in one call");
  }

 private:
  // These pointers are set in each launch, and are valid only during the launch:
  bool* over_{nullptr};
  const void* loss_{nullptr};
};

// Code that Dropout and its gradient share. Input: a tensor of a float dtype. Output: 0 for each
// dropped element, and the scaled element for each kept one. The scale preserves the expected
// value.
class Dropping : public HostKernel {
 public:
  bool Init(const KernelTensors&, const KernelTensors&) override {
    threshold_ = static_cast<uint64_t>(GetValue<int64_t>(this->primitive_->GetAttr("threshold")));
    return true;
  }
  int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
    count_ = Count(inputs[0]->GetShapeVector());
    return HostKernel::Resize(inputs, outputs);
  }
  std::vector<KernelAttr> GetOpSupport() override { return {KernelAttr().AddSkipCheckAttr(true)}; }

 protected:
  void Apply(const KernelTensor& from, const bool* kept, const KernelTensor& to) const {
    switch (from.dtype_id()) {
      case kNumberTypeFloat16:
        return ApplyTo<float16, float>(from, kept, to);
      case kNumberTypeBFloat16:
        return ApplyTo<bfloat16, float>(from, kept, to);
      case kNumberTypeFloat32:
        return ApplyTo<float, float>(from, kept, to);
      case kNumberTypeFloat64:
        return ApplyTo<double, double>(from, kept, to);
      default:  // the shape inference has already rejected such a tensor
        throw std::runtime_error("InternalError: " + kernel_name_ + " got a tensor whose dtype isn't a float dtype");
    }
  }

  uint64_t threshold_{0};  // an element is dropped if its 32-bit random number is below this threshold
  uint64_t count_{0};

 private:
  template <typename Element, typename Wide>
  void ApplyTo(const KernelTensor& from, const bool* kept, const KernelTensor& to) const {
    constexpr double kNumbers = 4294967296.0;
    const auto scale = static_cast<Wide>(kNumbers / (kNumbers - static_cast<double>(threshold_)));
    const auto* const x = static_cast<const Element*>(from.device_ptr());
    auto* const y = static_cast<Element*>(to.device_ptr());
    for (uint64_t i = 0; i < count_; ++i) {
      y[i] = kept[i] ? static_cast<Element>(static_cast<Wide>(x[i]) * scale) : static_cast<Element>(Wide{0});
    }
  }
};

// Input: x. Outputs: x with some elements dropped, and the mask (true for a kept element). In a
// sharded step, the random numbers depend on the shard and on the number of earlier draws for this
// shard. In any other step, they depend on the seed, the rank and the number of earlier draws in
// this process.
class Dropout : public Dropping {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    seed_ = static_cast<uint64_t>(GetValue<int64_t>(this->primitive_->GetAttr("seed")));
    rank_ = static_cast<uint32_t>(GetValue<int64_t>(this->primitive_->GetAttr("rank")));
    return Dropping::Init(inputs, outputs);
  }
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void*) override {
    auto* const kept = static_cast<bool*>(outputs[1]->device_ptr());
    Draw(kept);
    Apply(*inputs[0], kept, *outputs[0]);
    return true;
  }

 private:
  // Draws the mask with two stages of Philox. The first stage turns the key of the draw into 128
  // bits. The second stage turns these bits into random numbers, four per block.
  void Draw(bool* kept) const {
    static std::atomic<uint64_t> draws{0};
    constexpr uint32_t kNoPlace = ~0u;  // no draw of a shard has this number
    uint64_t seed = 0;
    uint64_t step = 0;
    uint32_t shard = 0;
    uint32_t place = 0;
    int any = 0;
    Check(kf_shard_key(&seed, &step, &shard, &place, &any));
    if (any == 0) {
      seed = seed_;
      step = draws.fetch_add(1, std::memory_order_relaxed);
      shard = rank_;
      place = kNoPlace;
    }
    const PhiloxBlock drawn =
        Philox({static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), shard, place}, seed);
    const uint64_t key = drawn[0] | static_cast<uint64_t>(drawn[1]) << 32;
    for (uint64_t i = 0; i < count_; i += 4) {
      const uint64_t block = i / 4;
      const PhiloxBlock numbers =
          Philox({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), drawn[2], drawn[3]}, key);
      const uint64_t left = std::min<uint64_t>(4, count_ - i);
      for (uint64_t k = 0; k < left; ++k) {
        kept[i + k] = numbers[k] >= threshold_;
      }
    }
  }

  uint64_t seed_{0};
  uint32_t rank_{0};
};

// Inputs: the gradient of Dropout's first output, and the mask. Output: the gradient of x.
class DropoutGrad : public Dropping {
 public:
  bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs, void*) override {
    Apply(*inputs[0], static_cast<const bool*>(inputs[1]->device_ptr()), *outputs[0]);
    return true;
  }
};

size_t SizeOf(kf_dtype dtype) {
  switch (dtype) {
    case KF_INT8:
    case KF_UINT8:
      return 1;
    case KF_INT16:
    case KF_UINT16:
    case KF_FLOAT16:
    case KF_BFLOAT16:
      return 2;
    case KF_INT32:
    case KF_UINT32:
    case KF_FLOAT32:
      return 4;
    case KF_INT64:
    case KF_UINT64:
    case KF_FLOAT64:
      return 8;
  }
  throw std::runtime_error("InternalError: an unknown dtype");
}

kf_status Copy(const Group& group) {
  for (const auto& tensor : group.tensors) {
    std::memcpy(tensor.output, tensor.input, tensor.count * SizeOf(group.dtype));
  }
  return KF_OK;
}

// Computes the sum, minimum or maximum over all V ranks of a virtual world (see ms_kungfu/msrun).
// The running workers do the work of all V ranks, so the sum is the workers' mean times V. A worker
// that hasn't begun training communicates with no other worker. Such a worker uses its own values
// for all V ranks.
class WorldAllReduce : public Reducing<Host> {
 public:
  bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
    ranks_of_world_ = static_cast<double>(GetValue<int64_t>(this->primitive_->GetAttr("world")));
    return Reducing<Host>::Init(inputs, outputs);
  }

 protected:
  uint32_t Ranks() const override { return 1; }  // any number works, because no shape depends on the number of ranks

  kf_status Run(const Group& group) override {
    const bool together = TakesPart();
    if (this->op_ != KF_SUM) {
      return together ? this->Bring(Host::kAllReduce, group, this->op_, this->Layout(group)) : Copy(group);
    }
    switch (group.dtype) {
      case KF_INT8:
        return Sum<int8_t>(group, together);
      case KF_UINT8:
        return Sum<uint8_t>(group, together);
      case KF_INT16:
        return Sum<int16_t>(group, together);
      case KF_UINT16:
        return Sum<uint16_t>(group, together);
      case KF_INT32:
        return Sum<int32_t>(group, together);
      case KF_UINT32:
        return Sum<uint32_t>(group, together);
      case KF_INT64:
        return Sum<int64_t>(group, together);
      case KF_UINT64:
        return Sum<uint64_t>(group, together);
      case KF_FLOAT16:
        return Sum<float16>(group, together);
      case KF_BFLOAT16:
        return Sum<bfloat16>(group, together);
      case KF_FLOAT32:
        return Sum<float>(group, together);
      case KF_FLOAT64:
        return Sum<double>(group, together);
    }
    throw std::runtime_error("InternalError: " + kernel_name_ + " got a tensor of an unknown dtype");
  }

 private:
  // Sums in doubles, so a mean of integers isn't rounded before it is multiplied by V. The result
  // is exact if all sums are below 2^53.
  template <typename Element>
  kf_status Sum(const Group& group, bool together) {
    using Wide = std::conditional_t<std::is_arithmetic_v<Element>, Element, float>;
    wide_.clear();
    for (const auto& tensor : group.tensors) {
      const auto* const x = static_cast<const Element*>(tensor.input);
      std::transform(x, x + tensor.count, std::back_inserter(wide_),
                     [](const Element& each) { return static_cast<double>(static_cast<Wide>(each)); });
    }
    if (together) {
      const kf_tensor all{wide_.data(), wide_.data(), wide_.size()};
      const kf_status status = kf_all_reduce(this->name().c_str(), &all, 1, KF_FLOAT64, KF_MEAN, this->Layout(group));
      if (status != KF_OK) {
        return status;
      }
    }
    const double* from = wide_.data();
    for (const auto& tensor : group.tensors) {
      std::transform(from, from + tensor.count, static_cast<Element*>(tensor.output), [this](double mean) {
        const double sum = mean * ranks_of_world_;
        return static_cast<Element>(static_cast<Wide>(std::is_integral_v<Element> ? std::nearbyint(sum) : sum));
      });
      from += tensor.count;
    }
    return KF_OK;
  }

  double ranks_of_world_{1};
  std::vector<double> wide_;
};

// Broadcasts the values of rank `root` of a virtual world. The source is the worker that does the
// work of this virtual rank. In the next step, another worker may do this work. A worker that
// hasn't begun training does the work of all virtual ranks itself.
class WorldBroadcast : public Broadcast<Host> {
 protected:
  uint32_t Ranks() const override { return 1; }  // any number works, because no shape depends on the number of ranks

  kf_status Run(const Group& group) override {
    if (!TakesPart()) {
      return Copy(group);
    }
    auto* const ask = who_plays.load();
    const std::string who = this->name() + " (living)";
    for (;;) {
      // Gather a list of running workers, so that all workers use the same list. Without the
      // gather, one worker might know of a failure that another worker hasn't noticed yet.
      const uint32_t ranks = ClusterSize();  // both calls below use it, because a second query might return another
                                             // size
      std::vector<uint8_t> living(ranks);
      const uint8_t here = 1;
      const kf_tensor tensor{&here, living.data(), 1};
      const kf_status known = kf_all_gather(who.c_str(), &tensor, 1, KF_UINT8, nullptr, ranks);
      if (known != KF_OK) return known;
      const int root = static_cast<int>(this->root_);
      const int player = ask == nullptr ? root : ask(root, living.data(), static_cast<int>(ranks));
      const kf_status status = this->Bring(Host::kBroadcast, group, static_cast<uint32_t>(player), this->Layout(group));
      // The worker that does the work of rank `root` has failed. All other workers know about this
      // failure, so they choose another worker in the next iteration. If no worker can continue,
      // the next gather fails.
      if (status != KF_PEER_LOST) return status;
    }
  }
};

bool AddShards(Factory<NativeCpuKernelMod>& factory) {
  Add<SumShards>(factory, "KungFuSumShards");
  Add<Dropout>(factory, "KungFuDropout");
  Add<DropoutGrad>(factory, "KungFuDropoutGrad");
  Add<WorldAllReduce>(factory, "KungFuWorldAllReduce");
  Add<WorldBroadcast>(factory, "KungFuWorldBroadcast");
  return true;
}

[[maybe_unused]] const bool added =
    AddAll<Host>(Factory<NativeCpuKernelMod>::Instance()) && AddShards(Factory<NativeCpuKernelMod>::Instance());

}  // namespace
}  // namespace mindspore::kernel::kungfu

// Sets the function that returns whether this worker contributes to the operations of the other
// workers. Each operation of the virtual world calls the function.
extern "C" __attribute__((visibility("default"))) void kungfu_ms_ask_whether_it_takes_part(int (*ask)()) {
  mindspore::kernel::kungfu::takes_part = ask;
}

// Sets the function that maps a virtual rank to the rank that does its work. Each broadcast of the
// virtual world calls the function. The function may return only ranks whose entry in the list
// isn't 0.
extern "C" __attribute__((visibility("default"))) void kungfu_ms_ask_who_plays(int (*ask)(int, const uint8_t*, int)) {
  mindspore::kernel::kungfu::who_plays = ask;
}
