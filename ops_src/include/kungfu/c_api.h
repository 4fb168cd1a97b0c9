// The C ABI of the runtime, which MindSpore's kernels call. MindSpore is built with the old C++
// ABI, and the runtime with the new one. So only C types, and no exceptions, cross this boundary.
//
// Any thread may call any function that returns kf_status. If a call fails, kf_last_error() on the
// same thread returns the message. The message begins with the name of the Python exception
// ("PeerLostError: ...").
#ifndef KUNGFU_C_API_H_
#define KUNGFU_C_API_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KF_API __attribute__((visibility("default")))
#else
#define KF_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kf_status {
  KF_OK = 0,
  KF_INVALID = 1,    // ValueError: the call was rejected before anything was sent
  KF_TYPE = 2,       // TypeError: the call was rejected before anything was sent
  KF_MISMATCH = 3,   // CollectiveMismatchError: the ranks called different operations; all of them get this error
  KF_PEER_LOST = 4,  // PeerLostError
  KF_TIMEOUT = 5,    // CollectiveTimeoutError
  KF_STALE = 6,      // StaleClusterError: a newer cluster version has replaced the communicator's version
  KF_ABORTED = 7,    // CollectiveAbortedError: another rank or thread closed the communicator
  KF_RESIZE = 8,     // ResizeError
  KF_INTERNAL = 9,   // InternalError: an invariant of the runtime is broken
  KF_MISSING = 10,   // ImportError: a required library is missing, or the file is a different library
  KF_DEVICE = 11,    // DeviceError: a device or its library reported an error
} kf_status;

typedef enum kf_dtype {
  KF_INT8 = 0,
  KF_UINT8 = 1,
  KF_INT16 = 2,
  KF_UINT16 = 3,
  KF_INT32 = 4,
  KF_UINT32 = 5,
  KF_INT64 = 6,
  KF_UINT64 = 7,
  KF_FLOAT16 = 8,
  KF_BFLOAT16 = 9,
  KF_FLOAT32 = 10,
  KF_FLOAT64 = 11,
} kf_dtype;

typedef enum kf_op {
  KF_SUM = 0,   // integers are summed in their own width, and wrap around on overflow
  KF_MEAN = 1,  // the sum divided by the number of contributing ranks; integers: exact, then truncated towards zero
  KF_MIN = 2,
  KF_MAX = 3,
  KF_PROD = 4,
} kf_op;

// One tensor of an operation. `count` is the number of elements in `input`. `output` normally has
// the same number of elements. An all-gather's output has `count` * ranks elements, and a
// reduce-scatter's output has `count` / ranks elements. If input == output, the operation is in
// place. Other overlaps aren't allowed.
typedef struct kf_tensor {
  const void* input;
  void* output;
  uint64_t count;
} kf_tensor;

// Runs an operation on `num_tensors` tensors of one dtype. The tensors are sent together, without
// first being copied into one array. Calls with the same `name` match: the k-th call on one rank
// matches the k-th call on every other rank. `layout` describes the shapes, e.g. "(2,3) (4,)". The
// ranks compare their layouts, and error messages contain them. `layout` may be NULL.
KF_API kf_status kf_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype, kf_op op,
                               const char* layout);
// Runs the all-reduces of a step's gradients, one after another, as one operation. If a rank fails
// during the call, it has contributed either to all of these all-reduces or to none. No output is
// valid before all of them have ended. If the ranks' numbers of samples differ, a mean of floats is
// weighted by these numbers, which are set in Python.
typedef struct kf_group {
  const char* name;
  const kf_tensor* tensors;
  size_t num_tensors;
  kf_dtype dtype;
  const char* layout;
} kf_group;
KF_API kf_status kf_all_reduce_gradients(const kf_group* groups, size_t num_groups, kf_op op);
// An all-reduce of gradients that is split into start and wait, so that the caller can do other
// work in between.
//
// kf_start_all_reduce copies the inputs, queues the operation and returns a ticket. One thread runs
// the queued operations in the order in which they were started. This order must be the same on all
// ranks.
//
// kf_wait blocks until all operations in `started` have ended. As with kf_all_reduce_gradients, a
// rank that fails has contributed either to all of them or to none. kf_wait returns the first
// failure. The outputs are written only during kf_wait, and hold the results when it returns KF_OK.
// In a cluster of one rank, the ticket is 0 and kf_start_all_reduce has already written the
// outputs.
//
// A ticket is valid for one wait. A ticket that is never waited for becomes void when the next
// operation with the same name and dtype starts.
KF_API kf_status kf_start_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                                     kf_op op, const char* layout, uint64_t* ticket);
// `tensors` are the tensors that were passed to kf_start_all_reduce, in the same order. Only
// `count` and `output` are used.
typedef struct kf_started {
  uint64_t ticket;
  const kf_tensor* tensors;
  size_t num_tensors;
} kf_started;
KF_API kf_status kf_wait(const kf_started* started, size_t num_started);
// Adds the gradients of one shard, in a step that ShardedStep has begun (see shards/step.h). If
// *over is 1 afterwards, the step has ended, and the outputs hold the sum over all shards, divided
// by the number of shards. If *over is 0, more shards must be computed, and the outputs aren't
// valid. Only float dtypes are supported. `loss` is the `input` pointer of the loss tensor, which
// isn't a gradient. `loss` may be NULL.
KF_API kf_status kf_sum_shards(const kf_group* groups, size_t num_groups, const void* loss, int* over);
// Returns the values that determine the random numbers of the current shard's next draw. *place is
// the number of earlier draws for this shard in all of the model's layers. Each call counts as one
// draw. *any is 0 if no shard is being computed.
KF_API kf_status kf_shard_key(uint64_t* seed, uint64_t* step, uint32_t* shard, uint32_t* place, int* any);
// Reads `input` on the root, and writes `output` on every other rank. Also writes `output` on the
// root if it isn't `input`.
KF_API kf_status kf_broadcast(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                              uint32_t root, const char* layout);
// `ranks` is the number of ranks for which the caller has allocated the outputs. If the cluster now
// has a different size, the call fails with KF_STALE. Pass 0 if the size can't change.
KF_API kf_status kf_all_gather(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                               const char* layout, uint32_t ranks);
// Each tensor's count must be divisible by the number of ranks.
KF_API kf_status kf_reduce_scatter(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                                   kf_op op, const char* layout, uint32_t ranks);
KF_API kf_status kf_barrier(const char* name);

// Resizes the cluster. Collective: all ranks must pass the same size. *changed is 1 if the
// membership has changed, and *detached is 1 if this process is no longer a member.
KF_API kf_status kf_resize(uint32_t size, int* changed, int* detached);

// Returns the current cluster, and this process's rank in it. Pass NULL for a value that isn't
// needed. If the process hasn't joined the cluster yet, it joins now. Joining may fail.
KF_API kf_status kf_cluster(uint32_t* rank, uint32_t* size, uint64_t* version);

// Each function returns one of kf_cluster's values, or 0 if kf_cluster fails. The functions exist
// for older programs.
KF_API uint32_t kf_rank(void);
KF_API uint32_t kf_size(void);
KF_API uint64_t kf_cluster_version(void);
// Describes the last all-reduce that this process has finished. *count is the number of ranks that
// contributed. *stamp changes whenever the set of contributing ranks changes. It contains the
// cluster version and, in the highest bits, the number of failures in that version. Both values are
// the same on all contributing ranks.
KF_API kf_status kf_participants(uint32_t* count, uint64_t* stamp);

// Returns the message of the last failed call on this thread. The pointer is valid until the next
// call that fails on this thread.
KF_API const char* kf_last_error(void);

#ifdef __cplusplus
}
#endif
#endif  // KUNGFU_C_API_H_
