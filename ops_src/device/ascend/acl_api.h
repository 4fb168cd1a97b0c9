// The runtime's own declarations of the functions that it calls in CANN's AscendCL, HCCL and aclnn.
// CANN isn't in any package registry, so the declarations follow the public documentation of CANN
// 8. This code has not yet run on a device.
#ifndef KUNGFU_DEVICE_ASCEND_ACL_API_H_
#define KUNGFU_DEVICE_ASCEND_ACL_API_H_

#include <cstddef>
#include <cstdint>

#include "base/library.h"

namespace kungfu::device::acl {

enum Error : int { kSuccess = 0, kRepeatInitialize = 100002 };
enum CopyKind : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
enum EventStatus : int { kNotComplete = 0, kComplete = 1 };
inline constexpr int kMallocHugeFirst = 0;
inline constexpr int kFormatNd = 2;
using Handle = void*;  // stands for aclrtStream, aclrtEvent and aclrtContext

struct Runtime {
  explicit Runtime(const char* paths) : library("AscendCL (libascendcl)", paths, {"libascendcl.so"}) {}

  const Library library;
  int (*Init)(const char* config) = library.Find("aclInit");
  const char* (*GetRecentErrMsg)() = library.FindOptional("aclGetRecentErrMsg");
  int (*GetDeviceCount)(uint32_t* count) = library.Find("aclrtGetDeviceCount");
  int (*GetDevice)(int32_t* device) = library.Find("aclrtGetDevice");
  int (*SetDevice)(int32_t device) = library.Find("aclrtSetDevice");
  int (*GetCurrentContext)(Handle* context) = library.Find("aclrtGetCurrentContext");
  int (*SetCurrentContext)(Handle context) = library.Find("aclrtSetCurrentContext");
  int (*Malloc)(void** memory, size_t bytes, int policy) = library.Find("aclrtMalloc");
  int (*Free)(void* memory) = library.Find("aclrtFree");
  int (*MallocHost)(void** memory, size_t bytes) = library.Find("aclrtMallocHost");
  int (*FreeHost)(void* memory) = library.Find("aclrtFreeHost");
  int (*CreateStream)(Handle* stream) = library.Find("aclrtCreateStream");
  int (*DestroyStream)(Handle stream) = library.Find("aclrtDestroyStream");
  int (*SynchronizeStream)(Handle stream) = library.Find("aclrtSynchronizeStream");
  int (*StreamAbort)(Handle stream) = library.FindOptional("aclrtStreamAbort");  // null before CANN 8
  int (*StreamWaitEvent)(Handle stream, Handle event) = library.Find("aclrtStreamWaitEvent");
  int (*CreateEvent)(Handle* event) = library.Find("aclrtCreateEvent");
  int (*DestroyEvent)(Handle event) = library.Find("aclrtDestroyEvent");
  int (*RecordEvent)(Handle event, Handle stream) = library.Find("aclrtRecordEvent");
  int (*QueryEventStatus)(Handle event, int* status) = library.Find("aclrtQueryEventStatus");
  int (*MemcpyAsync)(void* to, size_t room, const void* from, size_t bytes, int kind,
                     Handle stream) = library.Find("aclrtMemcpyAsync");
};

// The values of aclDataType.
enum Dtype : int { kFloat32 = 0, kFloat16 = 1, kFloat64 = 11, kBfloat16 = 27 };

// The functions that divide a tensor in place. HCCL has no mean, so a mean is a sum that is divided
// afterwards. Tensors, scalars and executors are opaque types.
struct Operators {
  const Library base{"aclnn's base (libnnopbase)", nullptr, {"libnnopbase.so"}};
  const Library library{"the operators of aclnn (libopapi)", nullptr, {"libopapi.so"}};
  void* (*CreateTensor)(const int64_t* shape, uint64_t rank, int dtype, const int64_t* stride, int64_t offset,
                        int format, const int64_t* storage_shape, uint64_t storage_rank,
                        void* data) = base.Find("aclCreateTensor");
  int (*DestroyTensor)(const void* tensor) = base.Find("aclDestroyTensor");
  void* (*CreateScalar)(void* value, int dtype) = base.Find("aclCreateScalar");
  int (*DestroyScalar)(const void* scalar) = base.Find("aclDestroyScalar");
  int (*InplaceDivsGetWorkspaceSize)(void* tensor, const void* scalar, uint64_t* bytes,
                                     void** executor) = library.Find("aclnnInplaceDivsGetWorkspaceSize");
  int (*InplaceDivs)(void* workspace, uint64_t bytes, void* executor, Handle stream) = library.Find("aclnnInplaceDivs");
};

}  // namespace kungfu::device::acl

namespace kungfu::device::hccl {

enum Result : int { kSuccess = 0 };
enum Dtype : int {
  kInt8 = 0,
  kInt16 = 1,
  kInt32 = 2,
  kFloat16 = 3,
  kFloat32 = 4,
  kInt64 = 5,
  kUint64 = 6,
  kUint8 = 7,
  kUint16 = 8,
  kUint32 = 9,
  kFloat64 = 10,
  kBfloat16 = 11,
};
enum Op : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3 };
inline constexpr size_t kRootInfoBytes = 4108;
struct RootInfo {
  char bytes[kRootInfoBytes];
};
using Comm = void*;

struct Library {
  explicit Library(const char* paths) : library("HCCL (libhccl)", paths, {"libhccl.so"}) {}

  const kungfu::Library library;
  int (*GetRootInfo)(RootInfo* info) = library.Find("HcclGetRootInfo");
  int (*CommInitRootInfo)(uint32_t size, const RootInfo* info, uint32_t rank,
                          Comm* comm) = library.Find("HcclCommInitRootInfo");
  int (*CommDestroy)(Comm comm) = library.Find("HcclCommDestroy");
  int (*GetCommAsyncError)(Comm comm, int* result) = library.FindOptional("HcclGetCommAsyncError");
  int (*AllReduce)(void* from, void* to, uint64_t count, int dtype, int op, Comm comm,
                   acl::Handle stream) = library.Find("HcclAllReduce");
  int (*Broadcast)(void* data, uint64_t count, int dtype, uint32_t root, Comm comm,
                   acl::Handle stream) = library.Find("HcclBroadcast");
  int (*AllGather)(void* from, void* to, uint64_t count, int dtype, Comm comm,
                   acl::Handle stream) = library.Find("HcclAllGather");
  int (*ReduceScatter)(void* from, void* to, uint64_t count, int dtype, int op, Comm comm,
                       acl::Handle stream) = library.Find("HcclReduceScatter");
  const char* (*GetErrorString)(int result) = library.FindOptional("HcclGetErrorString");
};

}  // namespace kungfu::device::hccl

#endif  // KUNGFU_DEVICE_ASCEND_ACL_API_H_
