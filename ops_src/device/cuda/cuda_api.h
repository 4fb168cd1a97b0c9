// The runtime's own declarations of the functions that it calls in the CUDA runtime and NCCL, so
// that the build needs neither. If the vendor's headers are installed,
// tests/devices/declarations.cc compares the declarations with them.
#ifndef KUNGFU_DEVICE_CUDA_CUDA_API_H_
#define KUNGFU_DEVICE_CUDA_CUDA_API_H_

#include <cstddef>

#include "base/library.h"

namespace kungfu::device::cuda {

enum Error : int { kSuccess = 0, kNotReady = 600 };
enum CopyKind : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
using Handle = void*;  // stands for cudaStream_t and cudaEvent_t

struct Runtime {
  explicit Runtime(const char* paths)
      : library("the CUDA runtime (libcudart)", paths,
                {"libcudart.so.11.0", "libcudart.so.12", "libcudart.so.13", "libcudart.so"}) {}

  const Library library;
  int (*GetDeviceCount)(int* count) = library.Find("cudaGetDeviceCount");
  int (*GetDevice)(int* device) = library.Find("cudaGetDevice");
  int (*SetDevice)(int device) = library.Find("cudaSetDevice");
  int (*DeviceGetPCIBusId)(char* id, int length, int device) = library.Find("cudaDeviceGetPCIBusId");
  int (*Malloc)(void** memory, size_t bytes) = library.Find("cudaMalloc");
  int (*Free)(void* memory) = library.Find("cudaFree");
  int (*HostAlloc)(void** memory, size_t bytes, unsigned flags) = library.Find("cudaHostAlloc");
  int (*FreeHost)(void* memory) = library.Find("cudaFreeHost");
  int (*StreamCreateWithFlags)(Handle* stream, unsigned flags) = library.Find("cudaStreamCreateWithFlags");
  int (*StreamDestroy)(Handle stream) = library.Find("cudaStreamDestroy");
  int (*StreamSynchronize)(Handle stream) = library.Find("cudaStreamSynchronize");
  int (*StreamWaitEvent)(Handle stream, Handle event, unsigned flags) = library.Find("cudaStreamWaitEvent");
  int (*EventCreateWithFlags)(Handle* event, unsigned flags) = library.Find("cudaEventCreateWithFlags");
  int (*EventDestroy)(Handle event) = library.Find("cudaEventDestroy");
  int (*EventRecord)(Handle event, Handle stream) = library.Find("cudaEventRecord");
  int (*EventQuery)(Handle event) = library.Find("cudaEventQuery");
  int (*MemcpyAsync)(void* to, const void* from, size_t bytes, int kind,
                     Handle stream) = library.Find("cudaMemcpyAsync");
  int (*GetLastError)() = library.Find("cudaGetLastError");
  const char* (*GetErrorName)(int error) = library.Find("cudaGetErrorName");
  const char* (*GetErrorString)(int error) = library.Find("cudaGetErrorString");
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
inline constexpr int kOldestVersion = 21400;  // the first version whose communicators can be created without blocking
inline constexpr size_t kIdBytes = 128;
struct Id {
  char bytes[kIdBytes];
};
using Comm = void*;

// NCCL's configuration in version 2.14. Later versions have more fields at the end. NCCL reads
// `size` and `version` to find out which fields the caller's structure has.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kOldestVersion;
  int blocking = 0;
};

struct Library {
  explicit Library(const char* paths) : library("NCCL (libnccl)", paths, {"libnccl.so.2", "libnccl.so"}) {}

  const kungfu::Library library;
  int (*GetVersion)(int* version) = library.Find("ncclGetVersion");
  const int version = KnownVersion();  // initialized before the functions below, because older versions don't have all
                                       // of them
  int (*GetUniqueId)(Id* id) = library.Find("ncclGetUniqueId");
  int (*CommInitRankConfig)(Comm* comm, int size, Id id, int rank,
                            Config* config) = library.Find("ncclCommInitRankConfig");
  int (*CommAbort)(Comm comm) = library.Find("ncclCommAbort");
  int (*CommGetAsyncError)(Comm comm, int* result) = library.Find("ncclCommGetAsyncError");
  int (*GroupStart)() = library.Find("ncclGroupStart");
  int (*GroupEnd)() = library.Find("ncclGroupEnd");
  int (*AllReduce)(const void* from, void* to, size_t count, int dtype, int op, Comm comm,
                   cuda::Handle stream) = library.Find("ncclAllReduce");
  int (*Broadcast)(const void* from, void* to, size_t count, int dtype, int root, Comm comm,
                   cuda::Handle stream) = library.Find("ncclBroadcast");
  int (*AllGather)(const void* from, void* to, size_t count, int dtype, Comm comm,
                   cuda::Handle stream) = library.Find("ncclAllGather");
  int (*ReduceScatter)(const void* from, void* to, size_t count, int dtype, int op, Comm comm,
                       cuda::Handle stream) = library.Find("ncclReduceScatter");
  const char* (*GetErrorString)(int result) = library.Find("ncclGetErrorString");
  const char* (*GetLastError)(Comm comm) = library.FindOptional("ncclGetLastError");

  // Returns the library's version. Throws Error KF_MISSING if the library is too old.
  int KnownVersion() const;
};

}  // namespace kungfu::device::nccl

#endif  // KUNGFU_DEVICE_CUDA_CUDA_API_H_
