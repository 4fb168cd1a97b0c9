// The C ABI of the device layer: memory, copies and streams of a GPU or an Ascend device, and collectives over tensors
// in device memory. The vendor's libraries are opened at run time and aren't needed to build.
//
// Between devices, the vendor's library (NCCL or HCCL) reduces, with its own rounding and order. These cases go through
// pinned host memory and the runtime's collectives between processes instead:
// - ranks share a device, or a rank has no such library;
// - the library doesn't reduce exactly as the runtime does (see docs/devices.md).
//
// As in c_api.h, any thread may call, and kf_last_error() returns the message of a failed call. The process's device
// must be current in the calling thread (cudaSetDevice, aclrtSetDevice), as it is in MindSpore's threads.
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
  KF_ENGINE_AUTO = 0,     // the vendor's library if all ranks can use it, otherwise host memory
  KF_ENGINE_VENDOR = 1,   // the vendor's library, even in a cluster of one; an error if it can't be used
  KF_ENGINE_STAGING = 2,  // host memory
} kf_engine;

typedef enum kf_copy_kind {
  KF_HOST_TO_DEVICE = 0,
  KF_DEVICE_TO_HOST = 1,
  KF_DEVICE_TO_DEVICE = 2,
} kf_copy_kind;

typedef void* kf_stream;  // the vendor's handle: cudaStream_t, aclrtStream

typedef struct kf_device_options {
  // Paths, separated by colons. The first library that can be opened is used. NULL: a library that the process has
  // already loaded, otherwise the loader's search for the library's usual names. The runtime's library is required; the
  // engine's library may be missing.
  const char* runtime_libraries;
  const char* engine_libraries;
  kf_engine engine;
  uint64_t chunk_bytes;  // chunk size for staging in host memory; 0: the default, 4 MiB
  uint32_t timeout_ms;   // time limit for an operation that all ranks have launched; 0: 600 s
} kf_device_options;

// Opens the vendor's libraries. Fails with KF_MISSING and the name of the missing library. A second call with the same
// kind does nothing; a call with the other kind fails with KF_INVALID.
KF_API kf_status kf_device_open(kf_device_kind kind, const kf_device_options* options);
// Waits for running operations, ends queued operations with KF_ABORTED, and releases everything except the libraries.
// Does nothing if no device is open. To avoid the wait, leave the cluster first.
KF_API void kf_device_close(void);
// Returns what the last collectives used, and why: "NCCL 2.21.5", "staging: rank 0 and rank 1 share device ...". Valid
// until this thread's next call.
KF_API const char* kf_device_engine(void);

KF_API kf_status kf_device_count(uint32_t* count);
KF_API kf_status kf_device_use(uint32_t device);  // makes the device current for the calling thread

KF_API kf_status kf_device_malloc(void** memory, uint64_t bytes);
KF_API kf_status kf_device_free(void* memory);
KF_API kf_status kf_device_malloc_host(void** memory, uint64_t bytes);  // pinned
KF_API kf_status kf_device_free_host(void* memory);

KF_API kf_status kf_stream_create(kf_stream* stream);
KF_API kf_status kf_stream_destroy(kf_stream stream);
KF_API kf_status kf_stream_synchronize(kf_stream stream);
// Asynchronous for the host if the host memory is pinned.
KF_API kf_status kf_device_copy(void* to, const void* from, uint64_t bytes, kf_copy_kind kind, kf_stream stream);

// The collectives of c_api.h over device memory. The device first waits for work that was enqueued on `stream` before
// the call. Work that is enqueued after the call has returned sees the results.
//
// The call returns when every rank knows that all ranks have the results. A failure before that point is detected while
// the inputs are still intact. In a cluster of one, the call doesn't wait.
//
// The ranks may call in different orders, from different threads and under different names. All operations are launched
// in one order.
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
// Split into start and wait, like kf_start_all_reduce. Nothing is copied: the inputs and outputs must stay allocated,
// and the inputs unchanged, until the wait has returned. All operations of one wait include the same ranks. A ticket is
// valid for one wait. If it is never waited for, it becomes void when its operation has ended and the next operation
// with its name starts.
KF_API kf_status kf_device_start_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors,
                                            kf_dtype dtype, kf_op op, const char* layout, kf_stream stream,
                                            uint64_t* ticket);
KF_API kf_status kf_device_wait(const uint64_t* tickets, size_t num_tickets);

#ifdef __cplusplus
}
#endif
#endif  // KUNGFU_DEVICE_H_
