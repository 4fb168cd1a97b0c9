#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "collectives/dtype.h"
#include "device/ascend/acl_api.h"
#include "device/driver.h"
#include "device/library.h"

namespace kungfu::device {
namespace {

int DtypeOf(kf_dtype dtype) {
  switch (dtype) {
    case KF_INT8:
      return hccl::kInt8;
    case KF_UINT8:
      return hccl::kUint8;
    case KF_INT16:
      return hccl::kInt16;
    case KF_UINT16:
      return hccl::kUint16;
    case KF_INT32:
      return hccl::kInt32;
    case KF_UINT32:
      return hccl::kUint32;
    case KF_INT64:
      return hccl::kInt64;
    case KF_UINT64:
      return hccl::kUint64;
    case KF_FLOAT16:
      return hccl::kFloat16;
    case KF_BFLOAT16:
      return hccl::kBfloat16;
    case KF_FLOAT32:
      return hccl::kFloat32;
    case KF_FLOAT64:
      return hccl::kFloat64;
  }
  return -1;
}

// HCCL reduces these on every device that it knows; more on some.
bool IsReduced(kf_dtype dtype) {
  return dtype == KF_INT8 || dtype == KF_INT32 || dtype == KF_FLOAT16 || dtype == KF_FLOAT32 || dtype == KF_BFLOAT16;
}

int OpOf(kf_op op) {
  switch (op) {
    case KF_SUM:
    case KF_MEAN:  // divided afterwards
      return hccl::kSum;
    case KF_MIN:
      return hccl::kMin;
    case KF_MAX:
      return hccl::kMax;
    case KF_PROD:
      return hccl::kProd;
  }
  return -1;
}

void Check(const hccl::Library& hccl, int result, const char* function) {
  if (result == hccl::kSuccess) return;
  const char* text = hccl.GetErrorString != nullptr ? hccl.GetErrorString(result) : nullptr;
  throw Error(KF_DEVICE, Text(function, ": error ", result, text != nullptr ? ": " : "", text != nullptr ? text : ""));
}

// Divides tensors on the device. The workspace is kept until the stream has used it.
class Division {
 public:
  Division(const acl::Operators& operators, Driver& driver) : operators_(operators), driver_(driver) {}

  void Launch(void* data, uint64_t count, kf_dtype dtype, uint32_t divisor, Stream stream) {
    const auto shape = static_cast<int64_t>(count);
    const int64_t stride = 1;
    auto value = static_cast<float>(divisor);
    const int type = dtype == KF_FLOAT16 ? acl::kFloat16 : dtype == KF_BFLOAT16 ? acl::kBfloat16 : acl::kFloat32;
    void* tensor = operators_.CreateTensor(&shape, 1, type, &stride, 0, acl::kFormatNd, &shape, 1, data);
    void* scalar = operators_.CreateScalar(&value, acl::kFloat32);
    uint64_t bytes = 0;
    void* executor = nullptr;
    int result = operators_.InplaceDivsGetWorkspaceSize(tensor, scalar, &bytes, &executor);
    if (result == acl::kSuccess) {
      void* workspace = nullptr;
      if (bytes > 0) {
        // One for all launches: they follow one another on the stream. A larger one must not take the other's place
        // before it is done with, so it is kept, too.
        if (workspaces_.empty() || bytes > last_bytes_) {
          workspaces_.push_back(std::make_unique<Block>(driver_, /*host=*/false));
          last_bytes_ = bytes;
        }
        workspace = workspaces_.back()->Get(last_bytes_);
      }
      result = operators_.InplaceDivs(workspace, bytes, executor, stream);
    }
    operators_.DestroyTensor(tensor);
    operators_.DestroyScalar(scalar);
    if (result != acl::kSuccess) throw Error(KF_DEVICE, Text("aclnnInplaceDivs: error ", result));
  }

 private:
  const acl::Operators& operators_;
  Driver& driver_;
  std::vector<std::unique_ptr<Block>> workspaces_;
  size_t last_bytes_ = 0;
};

// HCCL blocks while it brings a communicator up, and it can't be told to stop. So a thread of its own does it; an
// HcclCommunicator that is given up leaves it to end by itself (HCCL_CONNECT_TIMEOUT, 120 s by default).
struct BringUp {
  std::atomic<bool> ended{false};
  std::atomic<bool> let_go{false};  // by the thread or by its owner; the second of them destroys the communicator
  // The thread's until `ended`, then its owner's:
  int result = hccl::kSuccess;
  std::string failure;
  hccl::Comm comm = nullptr;

  void LetGo(const hccl::Library& hccl) {
    if (let_go.exchange(true) && comm != nullptr) hccl.CommDestroy(comm);
  }
};

class HcclCommunicator : public DeviceCommunicator {
 public:
  HcclCommunicator(const hccl::Library& hccl, const acl::Operators& operators, Driver& driver, const std::string& id,
                   uint32_t rank, uint32_t size)
      : hccl_(hccl), size_(size), rank_(rank), driver_(driver), division_(operators, driver) {
    auto info = std::make_shared<hccl::RootInfo>();
    std::memcpy(info->bytes, id.data(), hccl::kRootInfoBytes);
    // The library's table and the driver live as long as the process.
    std::thread([state = state_, info, &hccl, &driver, place = driver.Here(), rank, size] {
      try {
        driver.Enter(place);
        state->result = hccl.CommInitRootInfo(size, info.get(), rank, &state->comm);
      } catch (const std::exception& error) {
        state->failure = error.what();
      }
      state->ended.store(true);
      state->LetGo(hccl);
    }).detach();
  }
  ~HcclCommunicator() override { state_->LetGo(hccl_); }

  bool Ready() override {
    if (ready_) return true;
    if (!state_->ended.load()) return false;
    if (!state_->failure.empty()) throw Error(KF_DEVICE, state_->failure);
    Check(hccl_, state_->result, "HcclCommInitRootInfo");
    comm_ = state_->comm;
    ready_ = true;
    return true;
  }

  void Launch(const Operation& operation, Stream stream) override {
    const int dtype = DtypeOf(operation.dtype);
    const int op = OpOf(operation.op);
    for (size_t i = 0; i < operation.num_tensors; i++) {
      const kf_tensor& tensor = operation.tensors[i];
      if (tensor.count == 0) continue;
      void* input = const_cast<void*>(tensor.input);
      switch (operation.kind) {
        case Kind::kAllReduce:
          Check(hccl_, hccl_.AllReduce(input, tensor.output, tensor.count, dtype, op, comm_, stream), "HcclAllReduce");
          break;
        case Kind::kBroadcast:
          Check(hccl_, Broadcast(operation, tensor, dtype, stream), "HcclBroadcast");
          break;
        case Kind::kAllGather:
          Check(hccl_, hccl_.AllGather(input, tensor.output, tensor.count, dtype, comm_, stream), "HcclAllGather");
          break;
        case Kind::kReduceScatter:
          Check(hccl_, hccl_.ReduceScatter(input, tensor.output, tensor.count / size_, dtype, op, comm_, stream),
                "HcclReduceScatter");
          break;
        case Kind::kBarrier:
          break;
      }
      const bool reduces = operation.kind == Kind::kAllReduce || operation.kind == Kind::kReduceScatter;
      if (reduces && operation.op == KF_MEAN) {
        const uint64_t count = operation.kind == Kind::kAllReduce ? tensor.count : tensor.count / size_;
        if (count > 0) division_.Launch(tensor.output, count, operation.dtype, size_, stream);
      }
    }
  }

  void CheckHealth() override {
    if (hccl_.GetCommAsyncError == nullptr || !ready_) return;
    int state = hccl::kSuccess;
    Check(hccl_, hccl_.GetCommAsyncError(comm_, &state), "HcclGetCommAsyncError");
    Check(hccl_, state, "HCCL");
  }

 private:
  // HCCL's is always in place: what is the root's input for others becomes its output first.
  int Broadcast(const Operation& operation, const kf_tensor& tensor, int dtype, Stream stream) {
    if (tensor.output != tensor.input && operation.root == rank_) {
      driver_.Copy(tensor.output, tensor.input, tensor.count * SizeOf(operation.dtype), KF_DEVICE_TO_DEVICE, stream);
    }
    return hccl_.Broadcast(tensor.output, tensor.count, dtype, operation.root, comm_, stream);
  }

  const hccl::Library& hccl_;
  const uint32_t size_;
  const uint32_t rank_;
  Driver& driver_;
  Division division_;
  const std::shared_ptr<BringUp> state_ = std::make_shared<BringUp>();
  bool ready_ = false;
  hccl::Comm comm_ = nullptr;
};

class HcclEngine : public Engine {
 public:
  HcclEngine(const char* paths, Driver& driver)
      : library_("HCCL (libhccl)", paths, {"libhccl.so"}),
        base_("aclnn's base (libnnopbase)", nullptr, {"libnnopbase.so"}),
        operators_library_("the operators of aclnn (libopapi)", nullptr, {"libopapi.so"}),
        driver_(driver) {
#define KUNGFU_FIND(name) library_.Find("Hccl" #name, hccl_.name)
    KUNGFU_FIND(GetRootInfo);
    KUNGFU_FIND(CommInitRootInfo);
    KUNGFU_FIND(CommDestroy);
    KUNGFU_FIND(AllReduce);
    KUNGFU_FIND(Broadcast);
    KUNGFU_FIND(AllGather);
    KUNGFU_FIND(ReduceScatter);
#undef KUNGFU_FIND
    library_.FindOptional("HcclGetCommAsyncError", hccl_.GetCommAsyncError);
    library_.FindOptional("HcclGetErrorString", hccl_.GetErrorString);
    base_.Find("aclCreateTensor", operators_.CreateTensor);
    base_.Find("aclDestroyTensor", operators_.DestroyTensor);
    base_.Find("aclCreateScalar", operators_.CreateScalar);
    base_.Find("aclDestroyScalar", operators_.DestroyScalar);
    operators_library_.Find("aclnnInplaceDivsGetWorkspaceSize", operators_.InplaceDivsGetWorkspaceSize);
    operators_library_.Find("aclnnInplaceDivs", operators_.InplaceDivs);
  }

  std::string Name() const override { return "HCCL"; }

  bool Supports(const Operation& operation) const override {
    if (!(operation.kind == Kind::kAllReduce || operation.kind == Kind::kReduceScatter)) return true;
    return IsReduced(operation.dtype) && (operation.op != KF_MEAN || operation.dtype >= KF_FLOAT16);
  }

  size_t IdBytes() const override { return hccl::kRootInfoBytes; }
  std::string NewId() override {
    hccl::RootInfo info;
    Check(hccl_, hccl_.GetRootInfo(&info), "HcclGetRootInfo");
    return std::string(info.bytes, hccl::kRootInfoBytes);
  }
  std::unique_ptr<DeviceCommunicator> Begin(const std::string& id, uint32_t rank, uint32_t size) override {
    return std::make_unique<HcclCommunicator>(hccl_, operators_, driver_, id, rank, size);
  }

 private:
  const Library library_;
  const Library base_;
  const Library operators_library_;
  Driver& driver_;
  hccl::Library hccl_{};
  acl::Operators operators_{};
};

}  // namespace

std::unique_ptr<Engine> OpenHccl(const char* paths, Driver& driver) {
  return std::make_unique<HcclEngine>(paths, driver);
}

}  // namespace kungfu::device
