// Lets the program interrupt a thread that waits in the runtime. The Python bindings use it to
// handle Python's signals during a wait.
#ifndef KUNGFU_BASE_INTERRUPT_H_
#define KUNGFU_BASE_INTERRUPT_H_

#include "base/error.h"

namespace kungfu {

// The exception that ends an interrupted wait. Afterwards this process can't use the communicator
// any more. Communicator::GiveUp describes what happens on the other ranks.
class KF_API Interrupted : public Error {
 public:
  explicit Interrupted(const std::string& by) : Error(KF_ABORTED, "the wait was interrupted by " + by) {}
};

// While this object lives, the thread that created it calls `check` during each wait: every 20 ms,
// and when a signal interrupts the wait. `check` may throw only Interrupted. If `check` is null,
// the thread calls nothing.
class InterruptCheck {
 public:
  explicit InterruptCheck(void (*check)());
  ~InterruptCheck();
  InterruptCheck(const InterruptCheck&) = delete;
  InterruptCheck& operator=(const InterruptCheck&) = delete;

  static void Run();
  // Returns true if a caller further up in this thread's stack has set a check.
  static bool IsSet();

 private:
  void (*outer_)();
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_INTERRUPT_H_
