// The C ABI of the runtime: what MindSpore's kernels call. MindSpore is built with the old C++ ABI and the runtime with
// the new one, so nothing but C types crosses this border, and no exception does.
//
// Every function that returns kf_status may be called from any thread. A call that fails leaves its message, which
// begins with the name of the Python exception ("PeerLostError: ..."), in kf_last_error() of the calling thread.
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
  KF_INVALID = 1,    // ValueError: refused before anything was sent
  KF_TYPE = 2,       // TypeError: likewise
  KF_MISMATCH = 3,   // CollectiveMismatchError: the ranks did not bring the same operation; raised at each of them
  KF_PEER_LOST = 4,  // PeerLostError
  KF_TIMEOUT = 5,    // CollectiveTimeoutError
  KF_STALE = 6,      // StaleClusterError: the communicator belongs to a cluster version that is over
  KF_ABORTED = 7,    // CollectiveAbortedError: another rank or thread gave the communicator up
  KF_RESIZE = 8,     // ResizeError
  KF_INTERNAL = 9,   // InternalError: a broken invariant
  KF_MISSING = 10,   // ImportError: a library that is needed is not there, or is another one
  KF_DEVICE = 11,    // DeviceError: a device or its library refused or failed
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
  KF_SUM = 0,   // of integers in their own width: it wraps
  KF_MEAN = 1,  // sum divided by the number of ranks that took part; of integers exact, and truncated towards zero
  KF_MIN = 2,
  KF_MAX = 3,
  KF_PROD = 4,
} kf_op;

// One tensor of an operation. `count` is the number of elements of `input`; `output` holds count elements, times size
// for an all-gather, divided by size for a reduce-scatter. input == output is in place; other overlaps are not allowed.
typedef struct kf_tensor {
  const void* input;
  void* output;
  uint64_t count;
} kf_tensor;

// An operation over `num_tensors` tensors of one dtype, packed together without a flat copy. `name` matches it with the
// same operation at the other ranks (in the order of the calls under that name); `layout` describes the shapes for the
// check between ranks and for its message, e.g. "(2,3) (4,)", and may be NULL.
KF_API kf_status kf_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype, kf_op op,
                               const char* layout);
// The all-reduces of a step's gradients, one after another, as one: a rank that fails in them contributes to all or to
// none, and no output counts before all have ended. In a mean of floats the ranks count by the samples that they
// brought if these differ (weights set through Python).
typedef struct kf_group {
  const char* name;
  const kf_tensor* tensors;
  size_t num_tensors;
  kf_dtype dtype;
  const char* layout;
} kf_group;
KF_API kf_status kf_all_reduce_gradients(const kf_group* groups, size_t num_groups, kf_op op);
// A gradient reduction in two halves, for what the caller has to do meanwhile. Start copies the inputs, queues the
// operation for one thread that runs such operations in the order of their start (the same at all ranks), and gives a
// ticket. Wait blocks until all operations have ended, as those of kf_all_reduce_gradients do, and their results are in
// the outputs, and returns the first failure; no output is touched before or after. With ticket 0 (a cluster of one)
// the outputs have been written at the start. A ticket is good for one wait; one that is never waited for is void when
// the next operation of its name and dtype starts.
KF_API kf_status kf_start_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                                     kf_op op, const char* layout, uint64_t* ticket);
// The tensors are those of the start, in its order; only counts and outputs are looked at.
typedef struct kf_started {
  uint64_t ticket;
  const kf_tensor* tensors;
  size_t num_tensors;
} kf_started;
KF_API kf_status kf_wait(const kf_started* started, size_t num_started);
// The gradients of one shard of a step, which ShardedStep has begun: see shards/step.h. *over says whether the step is,
// and the sum over all shards, divided by their number, is in the outputs; else there are more shards to compute, and
// the outputs have no value. Float dtypes. `loss` is the input of the one tensor that is no gradient, a scalar, or
// NULL.
KF_API kf_status kf_sum_shards(const kf_group* groups, size_t num_groups, const void* loss, int* over);
// What random numbers that are drawn now, for the shard that is computed, are a function of. *place: how many draws,
// of whatever layer, computing the shard has made before; each call is one. *any is 0 if no shard is computed.
KF_API kf_status kf_shard_key(uint64_t* seed, uint64_t* step, uint32_t* shard, uint32_t* place, int* any);
// `input` is read at the root, `output` written at every other rank (and at the root if it is not `input`).
KF_API kf_status kf_broadcast(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                              uint32_t root, const char* layout);
// `ranks` is the number of ranks that the caller has sized the outputs for: if the cluster has another size by now
// the call is refused (KF_STALE). 0: it can't change meanwhile.
KF_API kf_status kf_all_gather(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                               const char* layout, uint32_t ranks);
// Each tensor's count must be divisible by the number of ranks.
KF_API kf_status kf_reduce_scatter(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                                   kf_op op, const char* layout, uint32_t ranks);
KF_API kf_status kf_barrier(const char* name);

// Collective. All ranks ask for the same size; *changed tells whether the membership is another one now, *detached
// whether this process is no longer part of it.
KF_API kf_status kf_resize(uint32_t size, int* changed, int* detached);

// The present cluster, and this process's rank in it; what is NULL isn't asked for. A process that has yet to join does
// so now, which may fail.
KF_API kf_status kf_cluster(uint32_t* rank, uint32_t* size, uint64_t* version);

// One of these alone, as older programs ask for it; 0 if kf_cluster fails.
KF_API uint32_t kf_rank(void);
KF_API uint32_t kf_size(void);
KF_API uint64_t kf_cluster_version(void);
// Of the last all-reduce of this process that has ended: how many ranks took part, and a number that changes whenever
// others do than before: the cluster version, with the failures within it in its highest bits. The same at all of them.
KF_API kf_status kf_participants(uint32_t* count, uint64_t* stamp);

// Message of the last failed call on this thread; valid until the next failing call on it.
KF_API const char* kf_last_error(void);

#ifdef __cplusplus
}
#endif
#endif  // KUNGFU_C_API_H_
