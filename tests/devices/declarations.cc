// Our declarations of the CUDA runtime, or with -DKUNGFU_NCCL of NCCL, against the vendor's header; that it compiles is
// the test. One at a time: nccl.h includes overloads of the runtime's functions.
#ifdef KUNGFU_NCCL
#include <nccl.h>
#else
#include <cuda_runtime_api.h>
#endif

#include <cstddef>
#include <type_traits>

#include "device/cuda/cuda_api.h"

namespace {

namespace cuda = kungfu::device::cuda;
namespace nccl = kungfu::device::nccl;

// A type as it crosses the border: enumerations are int, whatever is opaque is void.
template <typename T, typename = void>
struct Plain {
  using type = T;
};
template <typename T>
struct Plain<T, std::enable_if_t<std::is_enum_v<T>>> {
  using type = int;
};
template <typename T>
struct Plain<T, std::enable_if_t<std::is_class_v<T>>> {
  using type = void;
};
#ifdef KUNGFU_NCCL
template <>
struct Plain<ncclUniqueId> {
  using type = nccl::Id;
};
template <>
struct Plain<ncclConfig_t> {
  using type = nccl::Config;
};
#endif
template <>
struct Plain<nccl::Id> {
  using type = nccl::Id;
};
template <>
struct Plain<nccl::Config> {
  using type = nccl::Config;
};
template <typename T>
struct Plain<T*> {
  using type = typename Plain<T>::type*;
};
template <typename T>
struct Plain<const T> {
  using type = const typename Plain<T>::type;
};
template <typename R, typename... A>
struct Plain<R (*)(A...)> {
  using type = typename Plain<R>::type (*)(typename Plain<A>::type...);
};
template <typename R, typename... A>
struct Plain<R (*)(A...) noexcept> : Plain<R (*)(A...)> {};

template <typename A, typename B>
constexpr bool kSame = std::is_same_v<typename Plain<A>::type, typename Plain<B>::type>;

#ifndef KUNGFU_NCCL
#define KUNGFU_CUDA(name) static_assert(kSame<decltype(&cuda##name), decltype(cuda::Runtime::name)>, #name)
KUNGFU_CUDA(GetDeviceCount);
KUNGFU_CUDA(GetDevice);
KUNGFU_CUDA(SetDevice);
KUNGFU_CUDA(DeviceGetPCIBusId);
KUNGFU_CUDA(Malloc);
KUNGFU_CUDA(Free);
KUNGFU_CUDA(HostAlloc);
KUNGFU_CUDA(FreeHost);
KUNGFU_CUDA(StreamCreateWithFlags);
KUNGFU_CUDA(StreamDestroy);
KUNGFU_CUDA(StreamSynchronize);
KUNGFU_CUDA(StreamWaitEvent);
KUNGFU_CUDA(EventCreateWithFlags);
KUNGFU_CUDA(EventDestroy);
KUNGFU_CUDA(EventRecord);
KUNGFU_CUDA(EventQuery);
KUNGFU_CUDA(MemcpyAsync);
KUNGFU_CUDA(GetLastError);
KUNGFU_CUDA(GetErrorName);
KUNGFU_CUDA(GetErrorString);

static_assert(cuda::kSuccess == int{cudaSuccess} && cuda::kNotReady == int{cudaErrorNotReady});
static_assert(cuda::kHostToDevice == int{cudaMemcpyHostToDevice} &&
              cuda::kDeviceToHost == int{cudaMemcpyDeviceToHost} &&
              cuda::kDeviceToDevice == int{cudaMemcpyDeviceToDevice});
static_assert(cuda::kStreamNonBlocking == cudaStreamNonBlocking && cuda::kEventDisableTiming == cudaEventDisableTiming);

#else
#define KUNGFU_SAME(name) static_assert(kSame<decltype(&nccl##name), decltype(nccl::Library::name)>, #name)
KUNGFU_SAME(GetVersion);
KUNGFU_SAME(GetUniqueId);
KUNGFU_SAME(CommInitRankConfig);
KUNGFU_SAME(CommAbort);
KUNGFU_SAME(CommGetAsyncError);
KUNGFU_SAME(GroupStart);
KUNGFU_SAME(GroupEnd);
KUNGFU_SAME(AllReduce);
KUNGFU_SAME(Broadcast);
KUNGFU_SAME(AllGather);
KUNGFU_SAME(ReduceScatter);
KUNGFU_SAME(GetErrorString);
KUNGFU_SAME(GetLastError);

static_assert(sizeof(ncclUniqueId) == nccl::kIdBytes);
static_assert(nccl::kSuccess == int{ncclSuccess} && nccl::kInProgress == int{ncclInProgress});
static_assert(nccl::kInt8 == int{ncclInt8} && nccl::kUint8 == int{ncclUint8} && nccl::kInt32 == int{ncclInt32} &&
              nccl::kUint32 == int{ncclUint32} && nccl::kInt64 == int{ncclInt64} && nccl::kUint64 == int{ncclUint64} &&
              nccl::kFloat16 == int{ncclFloat16} && nccl::kFloat32 == int{ncclFloat32} &&
              nccl::kFloat64 == int{ncclFloat64} && nccl::kBfloat16 == int{ncclBfloat16});
static_assert(nccl::kSum == int{ncclSum} && nccl::kProd == int{ncclProd} && nccl::kMax == int{ncclMax} &&
              nccl::kMin == int{ncclMin} && nccl::kAvg == int{ncclAvg});
// Ours is the beginning of theirs, with the same marks.
static_assert(offsetof(ncclConfig_t, size) == offsetof(nccl::Config, size) &&
              offsetof(ncclConfig_t, magic) == offsetof(nccl::Config, magic) &&
              offsetof(ncclConfig_t, version) == offsetof(nccl::Config, version) &&
              offsetof(ncclConfig_t, blocking) == offsetof(nccl::Config, blocking));
constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
static_assert(kTheirs.magic == nccl::Config{}.magic);
#endif

}  // namespace
