// Makes the threads of PyNative mode flush denormals to zero.
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

// Makes the threads of PyNative mode's queues flush denormals to zero, as the threads in
// MindSpore's pool do. The queue threads compute operators (backend), gradients (bprop), and
// compiled functions that PyNative code calls (frontend). MindSpore chooses between these threads
// and the pool. The choice depends on how long the first launches took.
//
// During the call, no other thread may add work to the queues. The queues' own threads may add work
// until all queued work is done.
inline void FlushDenormalsOfQueues() {
  class Flush : public runtime::AsyncTask {
   public:
    Flush() : AsyncTask(runtime::kUnknownTask), caller_(std::this_thread::get_id()) {}
    void Run() override {
      if (std::this_thread::get_id() != caller_) {  // the caller runs the task itself if the queues are turned off
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
