// libnccl.so: what ms_kungfu uses of NCCL. Communicators never block.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "team.h"

using standin::Call;
using standin::Kind;
using standin::Team;

namespace {

enum {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7
};

struct Comm {
  std::shared_ptr<Team> team;
  std::atomic<int> state{kInProgress};
  std::atomic<bool> aborted{false};
};

std::mutex mutex;
std::map<void*, std::shared_ptr<Comm>>& Comms() {
  static auto* const comms = new std::map<void*, std::shared_ptr<Comm>>;
  return *comms;
}

std::shared_ptr<Comm> Find(void* handle, const char* function) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto found = Comms().find(handle);
  if (found != Comms().end()) return found->second;
  standin::Violation(std::string(function) + ": no communicator, or one that has been given up");
  return nullptr;
}

struct Launch {
  std::shared_ptr<Comm> comm;
  Call call;
  const void* input;
  void* output;
  void* stream;
};
thread_local std::vector<Launch> group;
thread_local int depth = 0;

int EnqueueAll(const std::vector<Launch>& launches) {
  for (const Launch& launch : launches) {
    if (standin::Enqueue(launch.stream, Team::TaskFor(launch.comm->team, launch.call, launch.input, launch.output)) !=
        standin::Status::kOk) {
      return kInvalidArgument;
    }
  }
  return kSuccess;
}

// A little later, as the real ones do when connections have to be made.
int Flush() {
  std::vector<Launch> launches;
  launches.swap(group);
  if (launches.empty()) return kSuccess;
  const std::shared_ptr<Comm> comm = launches[0].comm;
  comm->state = kInProgress;
  std::thread([launches, comm, device = standin::CurrentDevice()] {
    standin::SetCurrentDevice(device);
    const char* delay = std::getenv("STANDIN_DELAY_US");
    if (delay != nullptr) std::this_thread::sleep_for(std::chrono::microseconds(std::atoi(delay)));
    if (!comm->aborted) comm->state = EnqueueAll(launches);
  }).detach();
  return kInProgress;
}

// In NCCL's order.
constexpr standin::Dtype kDtypes[] = {standin::Dtype::kInt8,    standin::Dtype::kUint8,   standin::Dtype::kInt32,
                                      standin::Dtype::kUint32,  standin::Dtype::kInt64,   standin::Dtype::kUint64,
                                      standin::Dtype::kFloat16, standin::Dtype::kFloat32, standin::Dtype::kFloat64,
                                      standin::Dtype::kBfloat16};
constexpr standin::Op kOps[] = {standin::Op::kSum, standin::Op::kProd, standin::Op::kMax, standin::Op::kMin,
                                standin::Op::kAvg};

int Collective(const char* function, Kind kind, const void* from, void* to, size_t count, int dtype, int op, int root,
               void* handle, void* stream) {
  if (const int code = standin::Injected(function); code != 0) return code;
  const auto comm = Find(handle, function);
  if (comm == nullptr || dtype < 0 || dtype > 9 || op < 0 || op > 4 || root < 0) return kInvalidArgument;
  if (comm->state == kInProgress) {
    standin::Violation(std::string(function) + " while the communicator is still busy with an earlier call");
    return kInvalidUsage;
  }
  if (comm->team->device != standin::CurrentDevice()) {
    standin::Violation(std::string(function) + " on another device than the communicator's");
    return kInvalidUsage;
  }
  group.push_back({comm, {kind, kDtypes[dtype], kOps[op], static_cast<uint32_t>(root), count}, from, to, stream});
  return depth > 0 ? kSuccess : Flush();
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INJECT(name) \
  if (const int code = standin::Injected(name); code != 0) return code

struct ncclUniqueId {
  char bytes[128];
};
struct ncclConfig {
  size_t size;
  unsigned magic, version;
  int blocking;
};

EXPORT int ncclGetVersion(int* version) {
  INJECT("ncclGetVersion");
  const char* text = std::getenv("STANDIN_NCCL_VERSION");
  *version = text != nullptr ? std::atoi(text) : 22105;
  return kSuccess;
}
EXPORT int ncclGetUniqueId(ncclUniqueId* id) {
  INJECT("ncclGetUniqueId");
  std::memset(id->bytes, 0, sizeof id->bytes);
  const std::string made = standin::NewId();
  std::memcpy(id->bytes, made.data(), made.size());
  return kSuccess;
}
EXPORT int ncclCommInitRankConfig(void** handle, int size, ncclUniqueId id, int rank, const ncclConfig* config) {
  INJECT("ncclCommInitRankConfig");
  if (config->magic != 0xcafebeef || config->version < 21400 || config->size < sizeof(ncclConfig) ||
      config->blocking != 0) {
    standin::Violation("ncclCommInitRankConfig: another configuration than one that doesn't block");
    return kInvalidArgument;
  }
  auto comm = std::make_shared<Comm>();
  comm->team = std::make_shared<Team>(std::string(id.bytes, standin::kIdBytes), static_cast<uint32_t>(rank),
                                      static_cast<uint32_t>(size),
                                      standin::PhysicalDevice("CUDA_VISIBLE_DEVICES", standin::CurrentDevice()));
  std::thread([comm] { comm->state = comm->team->Connect() ? kSuccess : kRemoteError; }).detach();
  std::lock_guard<std::mutex> guard(mutex);
  *handle = comm.get();
  Comms().emplace(*handle, comm);
  return kInProgress;
}
EXPORT int ncclCommAbort(void* handle) {
  INJECT("ncclCommAbort");
  const auto comm = Find(handle, "ncclCommAbort");
  if (comm == nullptr) return kInvalidArgument;
  comm->aborted = true;
  comm->team->GiveUp();
  std::lock_guard<std::mutex> guard(mutex);
  Comms().erase(handle);
  return kSuccess;
}
EXPORT int ncclCommGetAsyncError(void* handle, int* state) {
  INJECT("ncclCommGetAsyncError");
  const auto comm = Find(handle, "ncclCommGetAsyncError");
  if (comm == nullptr) return kInvalidArgument;
  *state = comm->team->failed ? int{kInvalidUsage} : comm->state.load();
  return kSuccess;
}
EXPORT int ncclGroupStart() {
  INJECT("ncclGroupStart");
  depth++;
  return kSuccess;
}
EXPORT int ncclGroupEnd() {
  INJECT("ncclGroupEnd");
  if (depth == 0) return kInvalidUsage;
  return --depth == 0 ? Flush() : int{kSuccess};
}
EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int dtype, int op, void* comm, void* stream) {
  return Collective("ncclAllReduce", Kind::kAllReduce, from, to, count, dtype, op, 0, comm, stream);
}
EXPORT int ncclBroadcast(const void* from, void* to, size_t count, int dtype, int root, void* comm, void* stream) {
  return Collective("ncclBroadcast", Kind::kBroadcast, from, to, count, dtype, 0, root, comm, stream);
}
EXPORT int ncclAllGather(const void* from, void* to, size_t count, int dtype, void* comm, void* stream) {
  return Collective("ncclAllGather", Kind::kAllGather, from, to, count, dtype, 0, 0, comm, stream);
}
EXPORT int ncclReduceScatter(const void* from, void* to, size_t count, int dtype, int op, void* comm, void* stream) {
  return Collective("ncclReduceScatter", Kind::kReduceScatter, from, to, count, dtype, op, 0, comm, stream);
}
EXPORT const char* ncclGetErrorString(int result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a "
                                    "network error"};
  return result >= 0 && result < 7 ? kTexts[result] : "unknown result code";
}
EXPORT const char* ncclGetLastError(void*) { return ""; }
