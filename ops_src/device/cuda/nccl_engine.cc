#include <cstring>
#include <iterator>

#include "collectives/dtype.h"
#include "device/cuda/cuda_api.h"
#include "device/driver.h"

namespace kungfu::device {
namespace {

// NCCL's numbers for dtypes and reductions, in the order of kf_dtype and kf_op.
constexpr int kMissing = -1;
constexpr int kNcclDtypes[] = {
    nccl::kInt8,  nccl::kUint8,  kMissing,       kMissing,        nccl::kInt32,   nccl::kUint32,
    nccl::kInt64, nccl::kUint64, nccl::kFloat16, nccl::kBfloat16, nccl::kFloat32, nccl::kFloat64,
};
constexpr int kNcclOps[] = {nccl::kSum, nccl::kAvg, nccl::kMin, nccl::kMax, nccl::kProd};
static_assert(std::size(kNcclDtypes) == kNumDtypes && std::size(kNcclOps) == kNumOps);

std::string VersionText(int version) { return Text(version / 10000, ".", version / 100 % 100, ".", version % 100); }

void Check(const nccl::Library& nccl, int result, const char* function, nccl::Comm comm) {
  if (result == nccl::kSuccess || result == nccl::kInProgress) return;
  const char* detail = nccl.GetLastError != nullptr ? nccl.GetLastError(comm) : nullptr;
  throw Error(KF_DEVICE, Text(function, ": ", nccl.GetErrorString(result), " (", result, ")",
                              detail != nullptr && detail[0] != '\0' ? ": " : "", detail != nullptr ? detail : ""));
}

class NcclCommunicator : public DeviceCommunicator {
 public:
  NcclCommunicator(const nccl::Library& nccl, const std::string& id, uint32_t rank, uint32_t size)
      : nccl_(nccl), size_(size) {
    nccl::Id raw;
    std::memcpy(raw.bytes, id.data(), nccl::kIdBytes);
    nccl::Config config;  // non-blocking, so that the start of the communicator can be aborted if another rank fails
    const int result = nccl_.CommInitRankConfig(&comm_, static_cast<int>(size), raw, static_cast<int>(rank), &config);
    try {
      Check(result, "ncclCommInitRankConfig");
    } catch (...) {
      Abort();
      throw;
    }
  }
  ~NcclCommunicator() override { Abort(); }

  bool Ready() override {
    int state = nccl::kSuccess;
    Check(nccl_.CommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
    Check(state, "NCCL");
    return state == nccl::kSuccess;
  }

  void Launch(const Operation& operation, Stream stream) override {
    // Use one NCCL group, so that NCCL makes a single launch for all tensors.
    Check(nccl_.GroupStart(), "ncclGroupStart");
    try {
      for (size_t i = 0; i < operation.num_tensors; i++) {
        if (operation.tensors[i].count > 0) LaunchOne(operation, operation.tensors[i], stream);
      }
    } catch (...) {
      nccl_.GroupEnd();
      throw;
    }
    Check(nccl_.GroupEnd(), "ncclGroupEnd");
  }

  void CheckHealth() override { Ready(); }

 private:
  void LaunchOne(const Operation& operation, const kf_tensor& tensor, Stream stream) {
    const auto& [input, output, count] = tensor;
    const int dtype = kNcclDtypes[operation.dtype];
    const int op = kNcclOps[operation.op];
    const int root = static_cast<int>(operation.root);
    switch (operation.kind) {
      case Kind::kAllReduce:
        return Check(nccl_.AllReduce(input, output, count, dtype, op, comm_, stream), "ncclAllReduce");
      case Kind::kBroadcast:
        return Check(nccl_.Broadcast(input, output, count, dtype, root, comm_, stream), "ncclBroadcast");
      case Kind::kAllGather:
        return Check(nccl_.AllGather(input, output, count, dtype, comm_, stream), "ncclAllGather");
      case Kind::kReduceScatter:
        return Check(nccl_.ReduceScatter(input, output, count / size_, dtype, op, comm_, stream), "ncclReduceScatter");
      case Kind::kBarrier:
      case Kind::kReduceTo:  // a device never runs this operation
      case Kind::kGatherTo:
        return;
    }
  }

  void Check(int result, const char* function) const { device::Check(nccl_, result, function, comm_); }

  void Abort() noexcept {
    if (comm_ != nullptr) nccl_.CommAbort(comm_);
    comm_ = nullptr;
  }

  const nccl::Library& nccl_;  // owned by the engine, which outlives its communicators
  const size_t size_;
  nccl::Comm comm_ = nullptr;
};

class NcclEngine : public Engine {
 public:
  explicit NcclEngine(const char* paths) : nccl_(paths) {}

  std::string Name() const override { return "NCCL " + VersionText(nccl_.version); }

  bool Supports(const Operation& operation) const override {
    if (kNcclDtypes[operation.dtype] == kMissing) return false;
    // NCCL's versions differ in how ncclAvg rounds integers, so the runtime computes this mean
    // itself and truncates towards zero.
    return !Reduces(operation.kind) || operation.op != KF_MEAN || IsFloat(operation.dtype);
  }

  size_t IdBytes() const override { return nccl::kIdBytes; }
  std::string NewId() override {
    nccl::Id id;
    Check(nccl_, nccl_.GetUniqueId(&id), "ncclGetUniqueId", nullptr);
    return std::string(id.bytes, nccl::kIdBytes);
  }
  std::unique_ptr<DeviceCommunicator> Begin(const std::string& id, uint32_t rank, uint32_t size) override {
    return std::make_unique<NcclCommunicator>(nccl_, id, rank, size);
  }

 private:
  const nccl::Library nccl_;
};

}  // namespace

int nccl::Library::KnownVersion() const {
  int known = 0;
  if (GetVersion(&known) == kSuccess && known >= kOldestVersion) return known;
  throw Error(KF_MISSING, Text(library.path(), " is NCCL ", VersionText(known), "; 2.14 or later is required"));
}

std::unique_ptr<Engine> OpenNccl(const char* paths) { return std::make_unique<NcclEngine>(paths); }

}  // namespace kungfu::device
