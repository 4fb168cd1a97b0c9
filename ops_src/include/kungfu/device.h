// The C ABI of the device layer: memory, copies and streams of a GPU or an Ascend device, and the collectives
// over tensors in its memory. The vendor's libraries are opened at run time; nothing of them is needed to build.
//
// Between devices the vendor's library reduces (NCCL, HCCL), with its rounding and its order. Ranks that share a
// device, or of which one has no such library, and what the library doesn't reduce exactly as the runtime does (see
// docs/devices.md), go through pinned host memory and the runtime's collectives between the processes.
//
// As in c_api.h: any thread may call, a call that fails leaves its message in kf_last_error(). The thread that calls
// has to have the process's device current (cudaSetDevice, aclrtSetDevice), as MindSpore's threads do.
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
  KF_ENGINE_AUTO = 0,     // the vendor's library if all ranks can use it, else host memory
  KF_ENGINE_VENDOR = 1,   // the vendor's library, also in a cluster of one; an error if it can't be used
  KF_ENGINE_STAGING = 2,  // host memory
} kf_engine;

typedef enum kf_copy_kind {
  KF_HOST_TO_DEVICE = 0,
  KF_DEVICE_TO_HOST = 1,
  KF_DEVICE_TO_DEVICE = 2,
} kf_copy_kind;

typedef void* kf_stream;  // the vendor's handle: cudaStream_t, aclrtStream

typedef struct kf_device_options {
  // Paths, separated by colons; the first that can be opened is taken. NULL: what the process has loaded already, then
  // the loader's search by the library's usual names. The engine's library may be missing, the runtime's may not.
  const char* runtime_libraries;
  const char* engine_libraries;
  kf_engine engine;
  uint64_t chunk_bytes;  // of host staging; 0: the default, 4 MiB
  uint32_t timeout_ms;   // how long an operation that has been launched everywhere may take; 0: 600 s
} kf_device_options;

// Opens the vendor's libraries; fails with KF_MISSING and the name of what is missing. Once a process: again with the
// same kind it does nothing, with the other it is KF_INVALID.
KF_API kf_status kf_device_open(kf_device_kind kind, const kf_device_options* options);
// Waits for what is under way, ends what is queued (KF_ABORTED) and gives everything back but the libraries. Does
// nothing if none is open. A caller in a hurry leaves the cluster first.
KF_API void kf_device_close(void);
// What the collectives went through last, and why: "NCCL 2.21.5", "staging: rank 0 and rank 1 share device ...".
// Valid until the thread's next call.
KF_API const char* kf_device_engine(void);

KF_API kf_status kf_device_count(uint32_t* count);
KF_API kf_status kf_device_use(uint32_t device);  // makes it current for the calling thread

KF_API kf_status kf_device_malloc(void** memory, uint64_t bytes);
KF_API kf_status kf_device_free(void* memory);
KF_API kf_status kf_device_malloc_host(void** memory, uint64_t bytes);  // pinned
KF_API kf_status kf_device_free_host(void* memory);

KF_API kf_status kf_stream_create(kf_stream* stream);
KF_API kf_status kf_stream_destroy(kf_stream stream);
KF_API kf_status kf_stream_synchronize(kf_stream stream);
// Asynchronous for the host if its memory is pinned.
KF_API kf_status kf_device_copy(void* to, const void* from, uint64_t bytes, kf_copy_kind kind, kf_stream stream);

// The collectives of c_api.h over device memory. What was enqueued on `stream` before is waited for by the device, what
// is enqueued after the call has returned sees the results. The call returns when all ranks know that all of them have
// them: a failure before that is found out while the inputs are still whole. In a cluster of one it doesn't wait.
//
// The ranks may call in different orders, from different threads, under different names: all are launched in one order.
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
// In two halves, as kf_start_all_reduce. Nothing is copied: inputs and outputs have to stay, and the inputs as they
// are, until the wait has returned. All operations of one wait end with the same ranks in them. A ticket is good for
// one wait; one that is never waited for is void when the next operation of its name starts after its own has ended.
KF_API kf_status kf_device_start_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors,
                                            kf_dtype dtype, kf_op op, const char* layout, kf_stream stream,
                                            uint64_t* ticket);
KF_API kf_status kf_device_wait(const uint64_t* tickets, size_t num_tickets);

#ifdef __cplusplus
}
#endif
#endif  // KUNGFU_DEVICE_H_
