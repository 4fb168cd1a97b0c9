// Makes MindSpore's kernels compute in one part.
#ifndef KUNGFU_KERNELS_CPU_UNDIVIDED_H_
#define KUNGFU_KERNELS_CPU_UNDIVIDED_H_

#include <cstddef>

#include "actor/actormgr.h"
#include "include/runtime/utils/runtime_conf/runtime_conf.h"

namespace mindspore::kernel::kungfu {

// Makes MindSpore's kernels compute their work in one part, from now on. Returns false if MindSpore has no thread pool.
//
// Some kernels (`ParallelLaunchAutoSearch`: Log and others) try several numbers of parts in their first launches, and
// keep the fastest. Other kernels divide their work by the number of threads. The boundaries between parts decide which
// elements are computed by vector units and which one by one. They therefore affect the last bits of the result.
//
// Kernels never use more parts than the pool reports threads. This function makes the pool report 1 thread, which also
// overrides what kernels have found so far. The threads themselves, and the threads that run the graph's actors, don't
// change.
inline bool ComputeUndivided() {
  auto* const actors = ActorMgr::GetActorMgrRef();
  if (actors->GetActorThreadPool() == nullptr) {  // MindSpore creates the pool with the first graph; do the same
    constexpr size_t kActorQueue = 81920;
    size_t actor_threads = 0;
    size_t threads = 0;
    runtime::ComputeThreadNums(&actor_threads, &threads);
    (void)actors->Initialize(true, actor_threads, threads, kActorQueue);
  }
  auto* const pool = actors->GetActorThreadPool();
  if (pool == nullptr) {
    return false;
  }
  // Kernels use the sum of both thread numbers. The number of actor threads must not change. So set the other number
  // such that the sum is 1. It is unsigned, so it may wrap to a "negative" number.
  pool->SetKernelThreadNum(size_t{1} - pool->GetActorThreadNum());
  return pool->GetKernelThreadNum() == 1;
}

}  // namespace mindspore::kernel::kungfu
#endif  // KUNGFU_KERNELS_CPU_UNDIVIDED_H_
