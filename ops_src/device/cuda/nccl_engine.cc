#include <cstring>

#include "device/cuda/cuda_api.h"
#include "device/driver.h"
#include "device/library.h"

namespace kungfu::device {
namespace {

int DtypeOf(kf_dtype dtype) {
  switch (dtype) {
    case KF_INT8:
      return nccl::kInt8;
    case KF_UINT8:
      return nccl::kUint8;
    case KF_INT32:
      return nccl::kInt32;
    case KF_UINT32:
      return nccl::kUint32;
    case KF_INT64:
      return nccl::kInt64;
    case KF_UINT64:
      return nccl::kUint64;
    case KF_FLOAT16:
      return nccl::kFloat16;
    case KF_BFLOAT16:
      return nccl::kBfloat16;
    case KF_FLOAT32:
      return nccl::kFloat32;
    case KF_FLOAT64:
      return nccl::kFloat64;
    case KF_INT16:
    case KF_UINT16:
      return -1;  // NCCL has none
  }
  return -1;
}

int OpOf(kf_op op) {
  switch (op) {
    case KF_SUM:
      return nccl::kSum;
    case KF_MEAN:
      return nccl::kAvg;
    case KF_MIN:
      return nccl::kMin;
    case KF_MAX:
      return nccl::kMax;
    case KF_PROD:
      return nccl::kProd;
  }
  return -1;
}

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
    nccl::Config config;  // not blocking: the bring-up can be given up when a peer dies in it
    const int result = nccl_.CommInitRankConfig(&comm_, static_cast<int>(size), raw, static_cast<int>(rank), &config);
    try {
      Check(nccl_, result, "ncclCommInitRankConfig", comm_);
    } catch (...) {
      Abort();
      throw;
    }
  }
  ~NcclCommunicator() override { Abort(); }

  bool Ready() override { return Progress("NCCL"); }

  void Launch(const Operation& operation, Stream stream) override {
    const int dtype = DtypeOf(operation.dtype);
    const int op = OpOf(operation.op);
    // One group: NCCL makes one launch of all tensors.
    Check(nccl_, nccl_.GroupStart(), "ncclGroupStart", comm_);
    Error failure(KF_OK, "");
    for (size_t i = 0; i < operation.num_tensors && failure.status() == KF_OK; i++) {
      const kf_tensor& tensor = operation.tensors[i];
      if (tensor.count == 0) continue;
      try {
        LaunchOne(operation, tensor, dtype, op, stream);
      } catch (const Error& error) {
        failure = error;
      }
    }
    const int end = nccl_.GroupEnd();
    if (failure.status() != KF_OK) throw failure;
    Check(nccl_, end, "ncclGroupEnd", comm_);
  }

  void CheckHealth() override { Progress("NCCL"); }

 private:
  void LaunchOne(const Operation& operation, const kf_tensor& tensor, int dtype, int op, Stream stream) {
    switch (operation.kind) {
      case Kind::kAllReduce:
        Check(nccl_, nccl_.AllReduce(tensor.input, tensor.output, tensor.count, dtype, op, comm_, stream),
              "ncclAllReduce", comm_);
        return;
      case Kind::kBroadcast:
        Check(nccl_,
              nccl_.Broadcast(tensor.input, tensor.output, tensor.count, dtype, static_cast<int>(operation.root), comm_,
                              stream),
              "ncclBroadcast", comm_);
        return;
      case Kind::kAllGather:
        Check(nccl_, nccl_.AllGather(tensor.input, tensor.output, tensor.count, dtype, comm_, stream), "ncclAllGather",
              comm_);
        return;
      case Kind::kReduceScatter: {
        const size_t part = tensor.count / size_;
        Check(nccl_, nccl_.ReduceScatter(tensor.input, tensor.output, part, dtype, op, comm_, stream),
              "ncclReduceScatter", comm_);
        return;
      }
      case Kind::kBarrier:
        return;
    }
  }

  bool Progress(const char* function) {
    int state = nccl::kSuccess;
    Check(nccl_, nccl_.CommGetAsyncError(comm_, &state), "ncclCommGetAsyncError", comm_);
    Check(nccl_, state, function, comm_);
    return state == nccl::kSuccess;
  }

  void Abort() noexcept {
    if (comm_ != nullptr) nccl_.CommAbort(comm_);
    comm_ = nullptr;
  }

  const nccl::Library& nccl_;  // the engine's, which outlives its communicators
  const size_t size_;
  nccl::Comm comm_ = nullptr;
};

class NcclEngine : public Engine {
 public:
  explicit NcclEngine(const char* paths) : library_("NCCL (libnccl)", paths, {"libnccl.so.2", "libnccl.so"}) {
    library_.Find("ncclGetVersion", nccl_.GetVersion);
    const int result = nccl_.GetVersion(&version_);
    if (result != nccl::kSuccess || version_ < nccl::kOldestVersion) {
      throw Error(KF_MISSING, Text(library_.path(), " is NCCL ", Version(), "; 2.14 or a later one is needed"));
    }
#define KUNGFU_FIND(name) library_.Find("nccl" #name, nccl_.name)
    KUNGFU_FIND(GetUniqueId);
    KUNGFU_FIND(CommInitRankConfig);
    KUNGFU_FIND(CommAbort);
    KUNGFU_FIND(CommGetAsyncError);
    KUNGFU_FIND(GroupStart);
    KUNGFU_FIND(GroupEnd);
    KUNGFU_FIND(AllReduce);
    KUNGFU_FIND(Broadcast);
    KUNGFU_FIND(AllGather);
    KUNGFU_FIND(ReduceScatter);
    KUNGFU_FIND(GetErrorString);
#undef KUNGFU_FIND
    library_.FindOptional("ncclGetLastError", nccl_.GetLastError);
  }

  std::string Name() const override { return "NCCL " + Version(); }

  bool Supports(const Operation& operation) const override {
    if (DtypeOf(operation.dtype) < 0) return false;
    if (!(operation.kind == Kind::kAllReduce || operation.kind == Kind::kReduceScatter)) return true;
    // How ncclAvg rounds integers has changed between versions; ours truncate towards zero.
    return operation.op != KF_MEAN || operation.dtype >= KF_FLOAT16;
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
  std::string Version() const { return Text(version_ / 10000, ".", version_ / 100 % 100, ".", version_ % 100); }

  const Library library_;
  nccl::Library nccl_{};
  int version_ = 0;
};

}  // namespace

std::unique_ptr<Engine> OpenNccl(const char* paths) { return std::make_unique<NcclEngine>(paths); }

}  // namespace kungfu::device
