// Stops MindSpore's kernels from dividing their work into parts.
#ifndef KUNGFU_KERNELS_CPU_UNDIVIDED_H_
#define KUNGFU_KERNELS_CPU_UNDIVIDED_H_

#include <cstddef>

#include "actor/actormgr.h"
#include "include/runtime/utils/runtime_conf/runtime_conf.h"

namespace mindspore::kernel::kungfu {

// From now on, MindSpore's kernels don't divide their work into parts. Returns false if
// MindSpore has no thread pool.
//
// Some kernels (`Log` and others that use `ParallelLaunchAutoSearch`) try several numbers of parts
// in their first launches, and keep the number that was fastest. Other kernels divide their work by
// the number of threads. The boundaries between parts decide which elements are computed by vector
// units and which elements are computed one by one. The boundaries therefore affect the last bits
// of the result.
//
// A kernel never uses more parts than the number of threads that the pool reports. So this function
// makes the pool report 1 thread. Kernels that have already chosen a number of parts obey the new
// limit too. The pool's threads and the threads that run the graph's actors don't change.
inline bool ComputeUndivided() {
  auto* const actors = ActorMgr::GetActorMgrRef();
  if (actors->GetActorThreadPool() == nullptr) {  // MindSpore creates the pool with the first graph; create it now in
                                                  // the same way
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
  // Kernels use the sum of the pool's two thread counts. The count of actor threads must not
  // change, so the count of kernel threads becomes 1 minus that count. This unsigned value may wrap
  // around.
  pool->SetKernelThreadNum(size_t{1} - pool->GetActorThreadNum());
  return pool->GetKernelThreadNum() == 1;
}

}  // namespace mindspore::kernel::kungfu
#endif  // KUNGFU_KERNELS_CPU_UNDIVIDED_H_
