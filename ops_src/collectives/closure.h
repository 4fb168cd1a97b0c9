// Records whether a communicator is closed, and why.
#ifndef KUNGFU_COLLECTIVES_CLOSURE_H_
#define KUNGFU_COLLECTIVES_CLOSURE_H_

#include <atomic>
#include <mutex>
#include <string>

#include "base/error.h"

namespace kungfu {

// Thrown if this rank's communicator was closed before the call, or by another thread during the
// call. The thread that closed the communicator has already notified the other ranks.
struct Closed : Error {
  using Error::Error;
};

// Only the first call of Close has an effect. Thread-safe.
class Closure {
 public:
  // Closes the communicator unless it is already closed. `then` runs only if this call closes the
  // communicator, and before another thread can see the change.
  template <typename Then = void (*)()>
  void Close(kf_status status, const std::string& reason, const Then& then = [] {}) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (status_ != KF_OK) return;
    status_ = status;
    reason_ = reason;
    closed_.store(true, std::memory_order_release);
    then();
  }
  void ThrowIfClosed() const {
    if (!closed_.load(std::memory_order_acquire)) return;
    std::lock_guard<std::mutex> guard(mutex_);
    throw Closed(status_, reason_);
  }

 private:
  std::atomic<bool> closed_{false};
  mutable std::mutex mutex_;
  kf_status status_ = KF_OK;  // guarded by mutex_
  std::string reason_;        // guarded by mutex_
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_CLOSURE_H_
