// How long a wait may take, and when it says that it has taken long.
#ifndef KUNGFU_COLLECTIVES_HOST_DEADLINE_H_
#define KUNGFU_COLLECTIVES_HOST_DEADLINE_H_

#include <algorithm>
#include <chrono>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "base/run_time.h"

namespace kungfu::host {

// A waiter sleeps at most this long before it looks again whether its wait still makes sense.
inline constexpr auto kSlice = std::chrono::milliseconds(20);
static_assert(kSlice <= RunTime::kLongestSlice);

// Pauses in which this process did not run don't count (see RunTime): Passed is asked after every slice.
class Deadline {
 public:
  using Clock = RunTime::Clock;

  Deadline(std::chrono::milliseconds limit, std::chrono::milliseconds tell_after)
      : limit_(limit), tell_after_(tell_after) {}

  bool Passed(Clock::time_point now) { return waited_.Look(now) - counts_from_ > limit_; }
  // What is left is just enough for the launcher to find out which rank is awaited, and to end it. As of the last look.
  bool IsOverdue() const {
    return waited_.ran() - counts_from_ > limit_ - std::min<Clock::duration>(limit_ / 2, kReserve);
  }
  void CountFrom(Clock::time_point now) { counts_from_ = waited_.Look(now); }
  // The time since the last look doesn't count. Unlike CountFrom it leaves what has counted before, so that short holds
  // which come again and again don't keep a deadline from passing.
  void LeaveOut(Clock::time_point now) {
    const Clock::duration before = waited_.ran();
    counts_from_ += waited_.Look(now) - before;
  }
  // Logs `what`(seconds) at growing distances.
  template <typename What>
  void Tell(Clock::time_point now, const What& what) {
    const Clock::duration waited = waited_.Look(now);
    if (waited < tell_after_) return;
    tell_after_ *= 2;
    LogSometimes(what(std::chrono::duration<double>(waited).count()));
  }
  std::string Limit() const { return Text("within ", limit_.count() / 1000.0, " s"); }

 private:
  // The launcher looks once a second, is sure after 1.2 s of looks, hears of other hosts a second late, and has to tell
  // them. docs/recovery.md and the texts of the variables name this number.
  static constexpr auto kReserve = std::chrono::seconds(5);

  RunTime waited_;
  Clock::duration counts_from_ = Clock::duration::zero();
  const std::chrono::milliseconds limit_;
  std::chrono::milliseconds tell_after_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_DEADLINE_H_
