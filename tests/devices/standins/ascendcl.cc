// libascendcl.so: what ms_kungfu uses of AscendCL.
#include <cstdlib>

#include "simulated.h"

namespace {

constexpr const char* kVisible = "ASCEND_RT_VISIBLE_DEVICES";
enum { kSuccess = 0, kInvalidParam = 107000, kNoMemory = 207001, kRepeatInitialize = 100002 };

int CodeOf(standin::Status status) {
  switch (status) {
    case standin::Status::kOk:
      return kSuccess;
    case standin::Status::kInvalid:
      return kInvalidParam;
    case standin::Status::kNoMemory:
      return kNoMemory;
  }
  return kInvalidParam;
}

bool initialized = false;
thread_local const char* last_message = "";

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INJECT(name) \
  if (const int code = standin::Injected(name); code != 0) return code

EXPORT int aclInit(const char*) {
  INJECT("aclInit");
  if (initialized) return kRepeatInitialize;
  initialized = true;
  return kSuccess;
}
EXPORT const char* aclGetRecentErrMsg() {
  const char* message = last_message;
  last_message = "";
  return message;
}
EXPORT int aclrtGetDeviceCount(uint32_t* count) {
  INJECT("aclrtGetDeviceCount");
  if (!initialized) return kInvalidParam;
  *count = static_cast<uint32_t>(standin::CountDevices(kVisible));
  return kSuccess;
}
EXPORT int aclrtGetDevice(int32_t* device) {
  INJECT("aclrtGetDevice");
  *device = standin::CurrentDevice();
  return kSuccess;
}
EXPORT int aclrtSetDevice(int32_t device) {
  INJECT("aclrtSetDevice");
  if (device < 0 || device >= standin::CountDevices(kVisible)) return kInvalidParam;
  standin::SetCurrentDevice(device);
  return kSuccess;
}
// A context for each device, and no other.
EXPORT int aclrtGetCurrentContext(void** context) {
  INJECT("aclrtGetCurrentContext");
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(standin::CurrentDevice()) + 1);
  return kSuccess;
}
EXPORT int aclrtSetCurrentContext(void* context) {
  INJECT("aclrtSetCurrentContext");
  standin::SetCurrentDevice(static_cast<int>(reinterpret_cast<uintptr_t>(context) - 1));
  return kSuccess;
}
EXPORT int aclrtMalloc(void** memory, size_t bytes, int) {
  INJECT("aclrtMalloc");
  const standin::Status status = standin::Allocate(memory, bytes, false);
  if (status == standin::Status::kNoMemory) last_message = "out of memory";
  return CodeOf(status);
}
EXPORT int aclrtFree(void* memory) {
  INJECT("aclrtFree");
  return CodeOf(standin::Free(memory, false));
}
EXPORT int aclrtMallocHost(void** memory, size_t bytes) {
  INJECT("aclrtMallocHost");
  return CodeOf(standin::Allocate(memory, bytes, true));
}
EXPORT int aclrtFreeHost(void* memory) {
  INJECT("aclrtFreeHost");
  return CodeOf(standin::Free(memory, true));
}
EXPORT int aclrtCreateStream(void** stream) {
  INJECT("aclrtCreateStream");
  return CodeOf(standin::NewStream(stream));
}
EXPORT int aclrtDestroyStream(void* stream) {
  INJECT("aclrtDestroyStream");
  return CodeOf(standin::DestroyStream(stream));
}
EXPORT int aclrtSynchronizeStream(void* stream) {
  INJECT("aclrtSynchronizeStream");
  return CodeOf(standin::Synchronize(stream));
}
EXPORT int aclrtStreamAbort(void* stream) {
  INJECT("aclrtStreamAbort");
  return CodeOf(standin::AbortStream(stream));
}
EXPORT int aclrtStreamWaitEvent(void* stream, void* event) {
  INJECT("aclrtStreamWaitEvent");
  return CodeOf(standin::StreamWait(stream, event));
}
EXPORT int aclrtCreateEvent(void** event) {
  INJECT("aclrtCreateEvent");
  return CodeOf(standin::NewEvent(event));
}
EXPORT int aclrtDestroyEvent(void* event) {
  INJECT("aclrtDestroyEvent");
  return CodeOf(standin::DestroyEvent(event));
}
EXPORT int aclrtRecordEvent(void* event, void* stream) {
  INJECT("aclrtRecordEvent");
  return CodeOf(standin::RecordEvent(event, stream));
}
EXPORT int aclrtQueryEventStatus(void* event, int* status) {
  INJECT("aclrtQueryEventStatus");
  bool done = false;
  const standin::Status answer = standin::QueryEvent(event, &done);
  *status = done ? 1 : 0;
  return CodeOf(answer);
}
EXPORT int aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int kind, void* stream) {
  INJECT("aclrtMemcpyAsync");
  constexpr standin::Direction kDirections[] = {standin::Direction::kToDevice, standin::Direction::kToHost,
                                                standin::Direction::kOnDevice};
  if (kind < 1 || kind > 3 || room < bytes) return kInvalidParam;
  return CodeOf(standin::CopyAsync(to, from, bytes, kDirections[kind - 1], stream));
}
