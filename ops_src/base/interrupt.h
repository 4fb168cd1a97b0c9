// How a thread that waits in the runtime learns that its program wants to end: Python's signals, to the bindings.
#ifndef KUNGFU_BASE_INTERRUPT_H_
#define KUNGFU_BASE_INTERRUPT_H_

#include "base/error.h"

namespace kungfu {

// Thrown out of a wait. The communicator is finished for this process then; see Communicator::GiveUp for the others.
class KF_API Interrupted : public Error {
 public:
  explicit Interrupted(const std::string& by) : Error(KF_ABORTED, "the wait was interrupted by " + by) {}
};

// For as long as it lives, this thread calls `check` now and then while it waits (every 20 ms, and when a
// signal ends its sleep). `check` may throw Interrupted, and nothing else. Null: nothing is called.
class InterruptCheck {
 public:
  explicit InterruptCheck(void (*check)());
  ~InterruptCheck();
  InterruptCheck(const InterruptCheck&) = delete;
  InterruptCheck& operator=(const InterruptCheck&) = delete;

  static void Run();
  // Whether a caller above in this thread wants to know.
  static bool IsSet();

 private:
  void (*outer_)();
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_INTERRUPT_H_
