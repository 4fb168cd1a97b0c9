// Threads that take denormals for zero.
#ifndef KUNGFU_KERNELS_CPU_DENORMALS_H_
#define KUNGFU_KERNELS_CPU_DENORMALS_H_

#include <memory>
#include <thread>

#include "base/float_environment.h"
#include "runtime/pipeline/task/task.h"
#if __has_include("include/runtime/pipeline/pipeline.h")
#include "include/runtime/pipeline/pipeline.h"
#else  // MindSpore 2.7
#include "runtime/pipeline/pipeline.h"
#endif

namespace mindspore::kernel::kungfu {

// The threads of PyNative mode's queues compute, too: its operators (backend), those of gradients, and compiled
// functions that it calls (frontend). From now on they take denormals for zero as the pool's do: which of them computes
// is MindSpore's choice, by what was faster in the first launches.
//
// No other thread pushes while this runs: what was queued has been computed, so the queues' own threads, which push to
// each other, are idle.
inline void FlushDenormalsOfQueues() {
  class Flush : public runtime::AsyncTask {
   public:
    Flush() : AsyncTask(runtime::kUnknownTask), caller_(std::this_thread::get_id()) {}
    void Run() override {
      if (std::this_thread::get_id() != caller_) {  // as it is if queues are turned off
        (void)::kungfu::FlushDenormals(true);
      }
    }

   private:
    std::thread::id caller_;
  };
  auto& queues = runtime::Pipeline::Get();
  queues.WaitAll();
  for (auto* const queue : {queues.frontend_stage().get(), queues.bprop_stage().get(), queues.backend_stage().get()}) {
    queue->Push(std::make_shared<Flush>());
  }
  queues.WaitAll();
}

}  // namespace mindspore::kernel::kungfu
#endif  // KUNGFU_KERNELS_CPU_DENORMALS_H_
