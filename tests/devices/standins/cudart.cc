// libcudart.so: what ms_kungfu uses of the CUDA runtime, and then what MindSpore's own GPU plugin does.
#include <cstdio>
#include <cstring>

#include "simulated.h"

namespace {

constexpr const char* kVisible = "CUDA_VISIBLE_DEVICES";
enum { kSuccess = 0, kInvalidValue = 1, kMemoryAllocation = 2, kInvalidDevice = 101, kNotReady = 600 };

int CodeOf(standin::Status status) {
  switch (status) {
    case standin::Status::kOk:
      return kSuccess;
    case standin::Status::kInvalid:
      return kInvalidValue;
    case standin::Status::kNoMemory:
      return kMemoryAllocation;
  }
  return kInvalidValue;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INJECT(name) \
  if (const int code = standin::Injected(name); code != 0) return code

EXPORT int cudaGetDeviceCount(int* count) {
  INJECT("cudaGetDeviceCount");
  *count = standin::CountDevices(kVisible);
  return kSuccess;
}
EXPORT int cudaGetDevice(int* device) {
  INJECT("cudaGetDevice");
  *device = standin::CurrentDevice();
  return kSuccess;
}
EXPORT int cudaSetDevice(int device) {
  INJECT("cudaSetDevice");
  if (device < 0 || device >= standin::CountDevices(kVisible)) return kInvalidDevice;
  standin::SetCurrentDevice(device);
  return kSuccess;
}
EXPORT int cudaDeviceGetPCIBusId(char* id, int length, int device) {
  INJECT("cudaDeviceGetPCIBusId");
  std::snprintf(id, static_cast<size_t>(length), "0000:%02X:00.0", standin::PhysicalDevice(kVisible, device) + 1);
  return kSuccess;
}
EXPORT int cudaMalloc(void** memory, size_t bytes) {
  INJECT("cudaMalloc");
  return CodeOf(standin::Allocate(memory, bytes, false));
}
EXPORT int cudaFree(void* memory) {
  INJECT("cudaFree");
  return CodeOf(standin::Free(memory, false));
}
EXPORT int cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  INJECT("cudaHostAlloc");
  return CodeOf(standin::Allocate(memory, bytes, true));
}
EXPORT int cudaFreeHost(void* memory) {
  INJECT("cudaFreeHost");
  return CodeOf(standin::Free(memory, true));
}
EXPORT int cudaStreamCreateWithFlags(void** stream, unsigned) {
  INJECT("cudaStreamCreateWithFlags");
  return CodeOf(standin::NewStream(stream));
}
EXPORT int cudaStreamDestroy(void* stream) {
  INJECT("cudaStreamDestroy");
  return CodeOf(standin::DestroyStream(stream));
}
EXPORT int cudaStreamSynchronize(void* stream) {
  INJECT("cudaStreamSynchronize");
  return CodeOf(standin::Synchronize(stream));
}
EXPORT int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  INJECT("cudaStreamWaitEvent");
  return CodeOf(standin::StreamWait(stream, event));
}
EXPORT int cudaEventCreateWithFlags(void** event, unsigned) {
  INJECT("cudaEventCreateWithFlags");
  return CodeOf(standin::NewEvent(event));
}
EXPORT int cudaEventDestroy(void* event) {
  INJECT("cudaEventDestroy");
  return CodeOf(standin::DestroyEvent(event));
}
EXPORT int cudaEventRecord(void* event, void* stream) {
  INJECT("cudaEventRecord");
  return CodeOf(standin::RecordEvent(event, stream));
}
EXPORT int cudaEventQuery(void* event) {
  INJECT("cudaEventQuery");
  bool done = false;
  const standin::Status status = standin::QueryEvent(event, &done);
  return status == standin::Status::kOk && !done ? kNotReady : CodeOf(status);
}
EXPORT int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  INJECT("cudaMemcpyAsync");
  constexpr standin::Direction kDirections[] = {standin::Direction::kToDevice, standin::Direction::kToHost,
                                                standin::Direction::kOnDevice};
  if (kind < 1 || kind > 3) return kInvalidValue;
  return CodeOf(standin::CopyAsync(to, from, bytes, kDirections[kind - 1], stream));
}
EXPORT int cudaGetLastError() { return kSuccess; }
EXPORT const char* cudaGetErrorName(int error) {
  return error == kMemoryAllocation ? "cudaErrorMemoryAllocation"
         : error == kInvalidValue   ? "cudaErrorInvalidValue"
         : error == kInvalidDevice  ? "cudaErrorInvalidDevice"
                                    : "cudaErrorOfTheStandIn";
}
EXPORT const char* cudaGetErrorString(int error) {
  return error == kMemoryAllocation ? "out of memory" : "as the stand-in was told, or a violation";
}

EXPORT int cudaStreamCreate(void** stream) { return cudaStreamCreateWithFlags(stream, 0); }
EXPORT int cudaStreamCreateWithPriority(void** stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
EXPORT int cudaStreamQuery(void* stream) {
  bool done = false;
  const standin::Status status = standin::QueryStream(stream, &done);
  return status == standin::Status::kOk && !done ? kNotReady : CodeOf(status);
}
EXPORT int cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT int cudaMemGetInfo(size_t* free, size_t* total) {
  standin::Memory(free, total);
  return kSuccess;
}
// The fields that MindSpore reads, at their places in CUDA 11's cudaDeviceProp.
EXPORT int cudaGetDeviceProperties(char* properties, int) {
  size_t free = 0;
  size_t total = 0;
  standin::Memory(&free, &total);
  std::snprintf(properties, 256, "a stand-in");
  std::memcpy(properties + 288, &total, sizeof total);  // totalGlobalMem
  const int version[] = {8, 0};
  std::memcpy(properties + 360, version, sizeof version);  // major, minor
  return kSuccess;
}
