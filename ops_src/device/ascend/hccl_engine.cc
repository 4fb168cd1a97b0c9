#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>
#include <thread>
#include <vector>

#include "collectives/dtype.h"
#include "device/ascend/acl_api.h"
#include "device/driver.h"

namespace kungfu::device {
namespace {

// HCCL's numbers for dtypes and reductions, in the order of kf_dtype and kf_op. A mean is a sum
// that is divided afterwards.
constexpr int kHcclDtypes[] = {
    hccl::kInt8,  hccl::kUint8,  hccl::kInt16,   hccl::kUint16,   hccl::kInt32,   hccl::kUint32,
    hccl::kInt64, hccl::kUint64, hccl::kFloat16, hccl::kBfloat16, hccl::kFloat32, hccl::kFloat64,
};
constexpr int kHcclOps[] = {hccl::kSum, hccl::kSum, hccl::kMin, hccl::kMax, hccl::kProd};
static_assert(std::size(kHcclDtypes) == kNumDtypes && std::size(kHcclOps) == kNumOps);

// Returns true if HCCL can reduce `dtype` on every device. On some devices, HCCL reduces more
// dtypes.
bool IsReduced(kf_dtype dtype) {
  return dtype == KF_INT8 || dtype == KF_INT32 || dtype == KF_FLOAT16 || dtype == KF_FLOAT32 || dtype == KF_BFLOAT16;
}

void Check(const hccl::Library& hccl, int result, const char* function) {
  if (result == hccl::kSuccess) return;
  const char* text = hccl.GetErrorString != nullptr ? hccl.GetErrorString(result) : nullptr;
  throw Error(KF_DEVICE, Text(function, ": error ", result, text != nullptr ? ": " : "", text != nullptr ? text : ""));
}

// Divides tensors on the device. Keeps its workspace until the stream has finished using it.
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
        // One workspace serves all launches, because they run one after another on the stream. If a
        // larger workspace is needed, the old one is kept too, because the stream may still use it.
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

// Starts an HCCL communicator. The HCCL function blocks and can't be stopped, so a separate thread
// calls it. If the HcclCommunicator is destroyed before the call returns, the thread ends later on
// its own (after HCCL_CONNECT_TIMEOUT, 120 s by default).
struct BringUp {
  std::atomic<bool> ended{false};
  std::atomic<bool> let_go{false};  // set by both the thread and its owner; the later one destroys the communicator
  // The thread uses these members until `ended` is true. After that, the thread's owner uses them.
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
    // `hccl` and `driver` exist as long as the process, so the thread may refer to them.
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
    return ready_ = true;
  }

  void Launch(const Operation& operation, Stream stream) override {
    for (size_t i = 0; i < operation.num_tensors; i++) {
      if (operation.tensors[i].count > 0) LaunchOne(operation, operation.tensors[i], stream);
    }
  }

  void CheckHealth() override {
    if (hccl_.GetCommAsyncError == nullptr || !ready_) return;
    int state = hccl::kSuccess;
    Check(hccl_, hccl_.GetCommAsyncError(state_->comm, &state), "HcclGetCommAsyncError");
    Check(hccl_, state, "HCCL");
  }

 private:
  void LaunchOne(const Operation& operation, const kf_tensor& tensor, Stream stream) {
    const int dtype = kHcclDtypes[operation.dtype];
    const int op = kHcclOps[operation.op];
    hccl::Comm const comm = state_->comm;
    void* const input = const_cast<void*>(tensor.input);
    void* const output = tensor.output;
    const uint64_t count = operation.kind == Kind::kReduceScatter ? tensor.count / size_ : tensor.count;
    switch (operation.kind) {
      case Kind::kAllReduce:
        Check(hccl_, hccl_.AllReduce(input, output, count, dtype, op, comm, stream), "HcclAllReduce");
        break;
      case Kind::kBroadcast:
        // HCCL's broadcast is always in place. So the root first copies its input to its output.
        if (output != input && operation.root == rank_) {
          driver_.Copy(output, input, count * SizeOf(operation.dtype), KF_DEVICE_TO_DEVICE, stream);
        }
        Check(hccl_, hccl_.Broadcast(output, count, dtype, operation.root, comm, stream), "HcclBroadcast");
        break;
      case Kind::kAllGather:
        Check(hccl_, hccl_.AllGather(input, output, count, dtype, comm, stream), "HcclAllGather");
        break;
      case Kind::kReduceScatter:
        Check(hccl_, hccl_.ReduceScatter(input, output, count, dtype, op, comm, stream), "HcclReduceScatter");
        break;
      case Kind::kBarrier:
      case Kind::kReduceTo:  // a device never runs this operation
      case Kind::kGatherTo:
        break;
    }
    if (Reduces(operation.kind) && operation.op == KF_MEAN && count > 0) {
      division_.Launch(output, count, operation.dtype, size_, stream);
    }
  }

  const hccl::Library& hccl_;
  const uint32_t size_;
  const uint32_t rank_;
  Driver& driver_;
  Division division_;
  const std::shared_ptr<BringUp> state_ = std::make_shared<BringUp>();
  bool ready_ = false;
};

class HcclEngine : public Engine {
 public:
  HcclEngine(const char* paths, Driver& driver) : hccl_(paths), driver_(driver) {}

  std::string Name() const override { return "HCCL"; }

  bool Supports(const Operation& operation) const override {
    if (!Reduces(operation.kind)) return true;
    return IsReduced(operation.dtype) && (operation.op != KF_MEAN || IsFloat(operation.dtype));
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
  const hccl::Library hccl_;
  const acl::Operators operators_;
  Driver& driver_;
};

}  // namespace

std::unique_ptr<Engine> OpenHccl(const char* paths, Driver& driver) {
  return std::make_unique<HcclEngine>(paths, driver);
}

}  // namespace kungfu::device
