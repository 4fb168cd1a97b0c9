// The part of the CUDA runtime and of NCCL that is used, declared by ourselves so that neither is needed to build.
// tests/devices/declarations.cc compares it with the vendor's headers where they are.
#ifndef KUNGFU_DEVICE_CUDA_CUDA_API_H_
#define KUNGFU_DEVICE_CUDA_CUDA_API_H_

#include <cstddef>

namespace kungfu::device::cuda {

enum Error : int { kSuccess = 0, kNotReady = 600 };
enum CopyKind : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
using Handle = void*;  // cudaStream_t, cudaEvent_t

// Each member is the function `cuda` + its name.
struct Runtime {
  int (*GetDeviceCount)(int* count);
  int (*GetDevice)(int* device);
  int (*SetDevice)(int device);
  int (*DeviceGetPCIBusId)(char* id, int length, int device);
  int (*Malloc)(void** memory, size_t bytes);
  int (*Free)(void* memory);
  int (*HostAlloc)(void** memory, size_t bytes, unsigned flags);
  int (*FreeHost)(void* memory);
  int (*StreamCreateWithFlags)(Handle* stream, unsigned flags);
  int (*StreamDestroy)(Handle stream);
  int (*StreamSynchronize)(Handle stream);
  int (*StreamWaitEvent)(Handle stream, Handle event, unsigned flags);
  int (*EventCreateWithFlags)(Handle* event, unsigned flags);
  int (*EventDestroy)(Handle event);
  int (*EventRecord)(Handle event, Handle stream);
  int (*EventQuery)(Handle event);
  int (*MemcpyAsync)(void* to, const void* from, size_t bytes, int kind, Handle stream);
  int (*GetLastError)();
  const char* (*GetErrorName)(int error);
  const char* (*GetErrorString)(int error);
};

}  // namespace kungfu::device::cuda

namespace kungfu::device::nccl {

enum Result : int { kSuccess = 0, kInProgress = 7 };
enum Dtype : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};
enum Op : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };
inline constexpr int kOldestVersion = 21400;  // the first with communicators that don't block
inline constexpr size_t kIdBytes = 128;
struct Id {
  char bytes[kIdBytes];
};
using Comm = void*;

// As version 2.14 had it. Later ones have more fields at its end, and take from `size` and `version` what is there.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kOldestVersion;
  int blocking = 0;
};

// Each member is the function `nccl` + its name.
struct Library {
  int (*GetVersion)(int* version);
  int (*GetUniqueId)(Id* id);
  int (*CommInitRankConfig)(Comm* comm, int size, Id id, int rank, Config* config);
  int (*CommAbort)(Comm comm);
  int (*CommGetAsyncError)(Comm comm, int* result);
  int (*GroupStart)();
  int (*GroupEnd)();
  int (*AllReduce)(const void* from, void* to, size_t count, int dtype, int op, Comm comm, cuda::Handle stream);
  int (*Broadcast)(const void* from, void* to, size_t count, int dtype, int root, Comm comm, cuda::Handle stream);
  int (*AllGather)(const void* from, void* to, size_t count, int dtype, Comm comm, cuda::Handle stream);
  int (*ReduceScatter)(const void* from, void* to, size_t count, int dtype, int op, Comm comm, cuda::Handle stream);
  const char* (*GetErrorString)(int result);
  const char* (*GetLastError)(Comm comm);
};

}  // namespace kungfu::device::nccl

#endif  // KUNGFU_DEVICE_CUDA_CUDA_API_H_
