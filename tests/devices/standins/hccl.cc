// libhccl.so: what ms_kungfu uses of HCCL. Bringing a communicator up blocks, as HCCL's does.
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "team.h"

using standin::Call;
using standin::Kind;
using standin::Team;

namespace {

enum { kSuccess = 0, kParameter = 1, kInternal = 4, kNotSupported = 5, kRemote = 21 };

std::mutex mutex;
std::map<void*, std::shared_ptr<Team>>& Comms() {
  static auto* const comms = new std::map<void*, std::shared_ptr<Team>>;
  return *comms;
}

std::shared_ptr<Team> Find(void* handle, const char* function) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = Comms().find(handle);
  if (found != Comms().end()) return found->second;
  standin::Violation(std::string(function) + ": no communicator, or one that has been destroyed");
  return nullptr;
}

// In HCCL's order.
constexpr standin::Dtype kDtypes[] = {standin::Dtype::kInt8,    standin::Dtype::kInt16,   standin::Dtype::kInt32,
                                      standin::Dtype::kFloat16, standin::Dtype::kFloat32, standin::Dtype::kInt64,
                                      standin::Dtype::kUint64,  standin::Dtype::kUint8,   standin::Dtype::kUint16,
                                      standin::Dtype::kUint32,  standin::Dtype::kFloat64, standin::Dtype::kBfloat16};
constexpr standin::Op kOps[] = {standin::Op::kSum, standin::Op::kProd, standin::Op::kMax, standin::Op::kMin};

int Collective(const char* function, Kind kind, const void* from, void* to, uint64_t count, int dtype, int op,
               uint32_t root, void* handle, void* stream) {
  if (const int code = standin::Injected(function); code != 0) return code;
  const auto team = Find(handle, function);
  if (team == nullptr || dtype < 0 || dtype > 11 || op < 0 || op > 3) return kParameter;
  const bool reduces = kind == Kind::kAllReduce || kind == Kind::kReduceScatter;
  if (reduces && (dtype == 1 || (dtype > 4 && dtype < 11))) return kNotSupported;
  if (team->device != standin::CurrentDevice()) {
    standin::Violation(std::string(function) + " on another device than the communicator's");
    return kParameter;
  }
  const Call call{kind, kDtypes[dtype], kOps[op], root, count};
  return standin::Enqueue(stream, Team::TaskFor(team, call, from, to)) == standin::Status::kOk ? kSuccess : kInternal;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INJECT(name) \
  if (const int code = standin::Injected(name); code != 0) return code

constexpr size_t kRootInfoBytes = 4108;

EXPORT int HcclGetRootInfo(char* info) {
  INJECT("HcclGetRootInfo");
  std::memset(info, 0, kRootInfoBytes);
  const std::string made = standin::NewId();
  std::memcpy(info, made.data(), made.size());
  return kSuccess;
}
EXPORT int HcclCommInitRootInfo(uint32_t size, const char* info, uint32_t rank, void** handle) {
  INJECT("HcclCommInitRootInfo");
  auto team = std::make_shared<Team>(std::string(info, standin::kIdBytes), rank, size,
                                     standin::PhysicalDevice("ASCEND_RT_VISIBLE_DEVICES", standin::CurrentDevice()));
  if (!team->Connect()) return kRemote;
  std::lock_guard<std::mutex> guard(mutex);
  *handle = team.get();
  Comms().emplace(*handle, team);
  return kSuccess;
}
EXPORT int HcclCommDestroy(void* handle) {
  INJECT("HcclCommDestroy");
  const auto team = Find(handle, "HcclCommDestroy");
  if (team == nullptr) return kParameter;
  team->GiveUp();
  std::lock_guard<std::mutex> guard(mutex);
  Comms().erase(handle);
  return kSuccess;
}
EXPORT int HcclGetCommAsyncError(void* handle, int* result) {
  INJECT("HcclGetCommAsyncError");
  const auto team = Find(handle, "HcclGetCommAsyncError");
  if (team == nullptr) return kParameter;
  *result = team->failed ? kRemote : kSuccess;
  return kSuccess;
}
EXPORT int HcclAllReduce(void* from, void* to, uint64_t count, int dtype, int op, void* comm, void* stream) {
  return Collective("HcclAllReduce", Kind::kAllReduce, from, to, count, dtype, op, 0, comm, stream);
}
EXPORT int HcclBroadcast(void* data, uint64_t count, int dtype, uint32_t root, void* comm, void* stream) {
  return Collective("HcclBroadcast", Kind::kBroadcast, data, data, count, dtype, 0, root, comm, stream);
}
EXPORT int HcclAllGather(void* from, void* to, uint64_t count, int dtype, void* comm, void* stream) {
  return Collective("HcclAllGather", Kind::kAllGather, from, to, count, dtype, 0, 0, comm, stream);
}
EXPORT int HcclReduceScatter(void* from, void* to, uint64_t count, int dtype, int op, void* comm, void* stream) {
  return Collective("HcclReduceScatter", Kind::kReduceScatter, from, to, count, dtype, op, 0, comm, stream);
}
EXPORT const char* HcclGetErrorString(int result) {
  return result == kRemote ? "remote error" : result == kNotSupported ? "not supported" : "error of the stand-in";
}
