// The C ABI of the device layer: memory, copies and streams of a GPU or an Ascend device, and
// collectives on tensors in device memory. The vendor's libraries are opened at run time. The build
// doesn't need them.
//
// The vendor's library (NCCL or HCCL) performs the collectives between devices, with its own
// rounding and order. In the following cases, data goes through pinned host memory and the
// runtime's collectives between processes instead:
// - ranks share a device, or a rank has no such library;
// - the library doesn't reduce exactly as the runtime does (see docs/devices.md).
//
// As in c_api.h, any thread may call these functions, and kf_last_error() returns the message of a
// failed call. The process's device must be current in the calling thread (cudaSetDevice,
// aclrtSetDevice). MindSpore's threads meet this condition.
#ifndef KUNGFU_DEVICE_H_
#define KUNGFU_DEVICE_H_

#include "kungfu/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kf_device_kind {
  KF_DEVICE_GPU = 0,
  KF_DEVICE_ASCEND = 1,
} kf_device_kind;

typedef enum kf_engine {
  KF_ENGINE_AUTO = 0,     // the vendor's library if all ranks can use it, and host memory if not
  KF_ENGINE_VENDOR = 1,   // the vendor's library, even in a cluster of one rank; if it can't be used, the call fails
  KF_ENGINE_STAGING = 2,  // host memory
} kf_engine;

typedef enum kf_copy_kind {
  KF_HOST_TO_DEVICE = 0,
  KF_DEVICE_TO_HOST = 1,
  KF_DEVICE_TO_DEVICE = 2,
} kf_copy_kind;

typedef void* kf_stream;  // the vendor's handle: cudaStream_t or aclrtStream

typedef struct kf_device_options {
  // A list of paths, separated by colons. The first library that can be opened is used. If the list
  // is NULL, a library that the process has already loaded is used. If no library is loaded, the
  // loader searches for the library's usual names. The runtime's library is required. The engine's
  // library may be missing.
  const char* runtime_libraries;
  const char* engine_libraries;
  kf_engine engine;
  uint64_t chunk_bytes;  // chunk size for staging in host memory; 0 means the default, 4 MiB
  uint32_t timeout_ms;   // time limit for an operation that all ranks have launched; 0 means 600 s
} kf_device_options;

// Opens the vendor's libraries. If a library is missing, fails with KF_MISSING and names the
// library. A second call with the same kind does nothing. A second call with another kind fails
// with KF_INVALID.
KF_API kf_status kf_device_open(kf_device_kind kind, const kf_device_options* options);
// Waits for running operations, ends queued operations with KF_ABORTED, and releases everything
// except the libraries. Does nothing if no device is open. To avoid the wait, leave the cluster
// before this call.
KF_API void kf_device_close(void);
// Returns what the last collectives used, and the reason, for example "NCCL 2.21.5" or "staging:
// rank 0 and rank 1 share device ...". The pointer is valid until this thread calls this function
// again.
KF_API const char* kf_device_engine(void);

KF_API kf_status kf_device_count(uint32_t* count);
KF_API kf_status kf_device_use(uint32_t device);  // makes the device current for the calling thread

KF_API kf_status kf_device_malloc(void** memory, uint64_t bytes);
KF_API kf_status kf_device_free(void* memory);
KF_API kf_status kf_device_malloc_host(void** memory, uint64_t bytes);  // pinned memory
KF_API kf_status kf_device_free_host(void* memory);

KF_API kf_status kf_stream_create(kf_stream* stream);
KF_API kf_status kf_stream_destroy(kf_stream stream);
KF_API kf_status kf_stream_synchronize(kf_stream stream);
// The host doesn't wait for the copy if the host memory is pinned.
KF_API kf_status kf_device_copy(void* to, const void* from, uint64_t bytes, kf_copy_kind kind, kf_stream stream);

// The collectives of c_api.h on device memory. The device first waits for work that was enqueued on
// `stream` before the call. Work that is enqueued on `stream` after the call has returned sees the
// results.
//
// The call returns when every rank knows that all ranks have the results. A failure before that
// point is detected while the inputs are still intact. In a cluster of one rank, the call doesn't
// wait.
//
// The ranks may call these functions in different orders, from different threads and with different
// names. The runtime launches the operations in the same order on all ranks.
KF_API kf_status kf_device_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                                      kf_op op, const char* layout, kf_stream stream);
KF_API kf_status kf_device_broadcast(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                                     uint32_t root, const char* layout, kf_stream stream);
KF_API kf_status kf_device_all_gather(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                                      const char* layout, uint32_t ranks, kf_stream stream);
KF_API kf_status kf_device_reduce_scatter(const char* name, const kf_tensor* tensors, size_t num_tensors,
                                          kf_dtype dtype, kf_op op, const char* layout, uint32_t ranks,
                                          kf_stream stream);
KF_API kf_status kf_device_all_reduce_gradients(const kf_group* groups, size_t num_groups, kf_op op, kf_stream stream);
// An all-reduce that is split into start and wait, like kf_start_all_reduce. Nothing is copied. So
// until kf_device_wait has returned, the inputs and outputs must stay allocated, and the inputs
// must not change. All operations of one wait include the same ranks. A ticket is valid for one
// wait. A ticket that is never waited for becomes void when its operation has ended and the next
// operation with the same name starts.
KF_API kf_status kf_device_start_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors,
                                            kf_dtype dtype, kf_op op, const char* layout, kf_stream stream,
                                            uint64_t* ticket);
KF_API kf_status kf_device_wait(const uint64_t* tickets, size_t num_tickets);

#ifdef __cplusplus
}
#endif
#endif  // KUNGFU_DEVICE_H_
