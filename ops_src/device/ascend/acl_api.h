// The part of CANN's AscendCL, HCCL and aclnn that is used, declared by ourselves: CANN is on no package registry.
// Written after the public documentation of CANN 8. Nothing of it has been run on a device yet.
#ifndef KUNGFU_DEVICE_ASCEND_ACL_API_H_
#define KUNGFU_DEVICE_ASCEND_ACL_API_H_

#include <cstddef>
#include <cstdint>

namespace kungfu::device::acl {

enum Error : int { kSuccess = 0, kRepeatInitialize = 100002 };
enum CopyKind : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
enum EventStatus : int { kNotComplete = 0, kComplete = 1 };
inline constexpr int kMallocHugeFirst = 0;
inline constexpr int kFormatNd = 2;
using Handle = void*;  // aclrtStream, aclrtEvent, aclrtContext

struct Runtime {
  int (*Init)(const char* config);   // aclInit
  const char* (*GetRecentErrMsg)();  // aclGetRecentErrMsg
  // From here on each member is the function `aclrt` + its name.
  int (*GetDeviceCount)(uint32_t* count);
  int (*GetDevice)(int32_t* device);
  int (*SetDevice)(int32_t device);
  int (*GetCurrentContext)(Handle* context);
  int (*SetCurrentContext)(Handle context);
  int (*Malloc)(void** memory, size_t bytes, int policy);
  int (*Free)(void* memory);
  int (*MallocHost)(void** memory, size_t bytes);
  int (*FreeHost)(void* memory);
  int (*CreateStream)(Handle* stream);
  int (*DestroyStream)(Handle stream);
  int (*SynchronizeStream)(Handle stream);
  int (*StreamAbort)(Handle stream);  // null before CANN 8
  int (*StreamWaitEvent)(Handle stream, Handle event);
  int (*CreateEvent)(Handle* event);
  int (*DestroyEvent)(Handle event);
  int (*RecordEvent)(Handle event, Handle stream);
  int (*QueryEventStatus)(Handle event, int* status);
  int (*MemcpyAsync)(void* to, size_t room, const void* from, size_t bytes, int kind, Handle stream);
};

// aclDataType
enum Dtype : int { kFloat32 = 0, kFloat16 = 1, kFloat64 = 11, kBfloat16 = 27 };

// Division in place, which HCCL has not: a mean is a sum, divided. Tensors, scalars and executors are opaque.
struct Operators {
  void* (*CreateTensor)(const int64_t* shape, uint64_t rank, int dtype, const int64_t* stride, int64_t offset,
                        int format, const int64_t* storage_shape, uint64_t storage_rank, void* data);
  int (*DestroyTensor)(const void* tensor);
  void* (*CreateScalar)(void* value, int dtype);
  int (*DestroyScalar)(const void* scalar);
  int (*InplaceDivsGetWorkspaceSize)(void* tensor, const void* scalar, uint64_t* bytes, void** executor);  // aclnn
  int (*InplaceDivs)(void* workspace, uint64_t bytes, void* executor, Handle stream);                      // aclnn
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

// Each member is the function `Hccl` + its name.
struct Library {
  int (*GetRootInfo)(RootInfo* info);
  int (*CommInitRootInfo)(uint32_t size, const RootInfo* info, uint32_t rank, Comm* comm);
  int (*CommDestroy)(Comm comm);
  int (*GetCommAsyncError)(Comm comm, int* result);
  int (*AllReduce)(void* from, void* to, uint64_t count, int dtype, int op, Comm comm, acl::Handle stream);
  int (*Broadcast)(void* data, uint64_t count, int dtype, uint32_t root, Comm comm, acl::Handle stream);
  int (*AllGather)(void* from, void* to, uint64_t count, int dtype, Comm comm, acl::Handle stream);
  int (*ReduceScatter)(void* from, void* to, uint64_t count, int dtype, int op, Comm comm, acl::Handle stream);
  const char* (*GetErrorString)(int result);
};

}  // namespace kungfu::device::hccl

#endif  // KUNGFU_DEVICE_ASCEND_ACL_API_H_
