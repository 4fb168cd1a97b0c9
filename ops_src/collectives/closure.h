// The end of a communicator.
#ifndef KUNGFU_COLLECTIVES_CLOSURE_H_
#define KUNGFU_COLLECTIVES_CLOSURE_H_

#include <atomic>
#include <mutex>
#include <string>

#include "base/error.h"

namespace kungfu {

// This rank's communicator was closed before, or meanwhile, by another of its threads perhaps. The other ranks need no
// notice: the thread that closed it has notified them.
struct Closed : Error {
  using Error::Error;
};

// That it is over, and why: the first reason stays. Thread-safe.
class Closure {
 public:
  // If this closes it, and it wasn't closed before, `then` runs before any other caller sees that it is.
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
