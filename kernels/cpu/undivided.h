// Kernels that compute in one part.
#ifndef KUNGFU_KERNELS_CPU_UNDIVIDED_H_
#define KUNGFU_KERNELS_CPU_UNDIVIDED_H_

#include <cstddef>

#include "actor/actormgr.h"
#include "include/runtime/utils/runtime_conf/runtime_conf.h"

namespace mindspore::kernel::kungfu {

// Some of MindSpore's kernels (`ParallelLaunchAutoSearch`: Log and others) try in their first launches into how many
// parts their work is best divided, and keep what was fastest; others divide it by the number of threads. If a part
// begins decides which elements vector units compute and which are computed one by one, and so the last bits. They
// never take more parts than the process's pool says that it has threads: from now on it says 1, and what has been
// found out before no longer counts. The threads themselves, and those that run the graph's actors, stay as they are.
//
// False: there is no such pool.
inline bool ComputeUndivided() {
  auto* const actors = ActorMgr::GetActorMgrRef();
  if (actors->GetActorThreadPool() == nullptr) {  // it is made with the first graph: as MindSpore does it
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
  // What kernels go by is the sum of both numbers. That of the actors' threads is needed as it is, so this one makes
  // the sum 1: unsigned, hence it may be "negative".
  pool->SetKernelThreadNum(size_t{1} - pool->GetActorThreadNum());
  return pool->GetKernelThreadNum() == 1;
}

}  // namespace mindspore::kernel::kungfu
#endif  // KUNGFU_KERNELS_CPU_UNDIVIDED_H_
