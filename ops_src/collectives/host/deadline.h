// How long a wait may take, and when it says that it has taken long.
#ifndef KUNGFU_COLLECTIVES_HOST_DEADLINE_H_
#define KUNGFU_COLLECTIVES_HOST_DEADLINE_H_

#include <chrono>
#include <string>

#include "base/error.h"
#include "base/log.h"

namespace kungfu::host {

// A waiter sleeps at most this long before it looks again whether its wait still makes sense.
inline constexpr auto kSlice = std::chrono::milliseconds(20);

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  Deadline(std::chrono::milliseconds limit, std::chrono::milliseconds tell_after)
      : began_(Clock::now()), counts_from_(began_), limit_(limit), tell_after_(tell_after) {}

  bool Passed(Clock::time_point now) const { return now - counts_from_ > limit_; }
  void CountFrom(Clock::time_point now) { counts_from_ = now; }
  // Logs `what`(seconds) at growing distances.
  template <typename What>
  void Tell(Clock::time_point now, const What& what) {
    if (now - began_ < tell_after_) return;
    tell_after_ *= 2;
    LogSometimes(what(std::chrono::duration<double>(now - began_).count()));
  }
  std::string Limit() const { return Text("within ", limit_.count() / 1000.0, " s"); }

 private:
  const Clock::time_point began_;
  Clock::time_point counts_from_;
  const std::chrono::milliseconds limit_;
  std::chrono::milliseconds tell_after_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_DEADLINE_H_
