// The time limit of a wait, and log messages about long waits.
#ifndef KUNGFU_COLLECTIVES_HOST_DEADLINE_H_
#define KUNGFU_COLLECTIVES_HOST_DEADLINE_H_

#include <algorithm>
#include <chrono>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "base/run_time.h"

namespace kungfu::host {

// A waiting thread sleeps for at most this long before it checks whether its wait can still
// succeed.
inline constexpr auto kSlice = std::chrono::milliseconds(20);
static_assert(kSlice <= RunTime::kLongestSlice);

// The time limit of one wait. Time during which the process was stopped doesn't count (see
// RunTime). To detect these pauses, the waiting thread must call `Passed` after every sleep.
class Deadline {
 public:
  using Clock = RunTime::Clock;

  Deadline(std::chrono::milliseconds limit, std::chrono::milliseconds tell_after)
      : limit_(limit), tell_after_(tell_after) {}

  bool Passed(Clock::time_point now) { return waited_.Look(now) - counts_from_ > limit_; }
  // Returns true if the deadline is near. The remaining time is just enough for the launcher to
  // identify and kill the awaited rank.
  bool IsOverdue() const {
    return waited_.ran() - counts_from_ > limit_ - std::min<Clock::duration>(limit_ / 2, kReserve);
  }
  void CountFrom(Clock::time_point now) { counts_from_ = waited_.Look(now); }
  // Excludes the time since the last reading of the clock. Unlike `CountFrom`, this function keeps
  // the time that was counted before. So the deadline can't be postponed forever by repeatedly
  // excluding short periods.
  void LeaveOut(Clock::time_point now) {
    const Clock::duration before = waited_.ran();
    counts_from_ += waited_.Look(now) - before;
  }
  // Logs the text that `what(seconds)` returns, at growing intervals.
  template <typename What>
  void Tell(Clock::time_point now, const What& what) {
    const Clock::duration waited = waited_.Look(now);
    if (waited < tell_after_) return;
    tell_after_ *= 2;
    LogSometimes(what(std::chrono::duration<double>(waited).count()));
  }
  std::string Limit() const { return Text("within ", limit_.count() / 1000.0, " s"); }

 private:
  // The launcher checks once per second and decides after 1.2 s of checks. Waits on other hosts are
  // reported to the launcher one second late, and the launcher must then notify these hosts.
  // docs/recovery.md and the descriptions of the environment variables also contain the value of
  // kReserve.
  static constexpr auto kReserve = std::chrono::seconds(5);

  RunTime waited_;
  Clock::duration counts_from_ = Clock::duration::zero();
  const std::chrono::milliseconds limit_;
  std::chrono::milliseconds tell_after_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_DEADLINE_H_
