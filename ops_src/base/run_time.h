// Deadlines that aren't affected by a pause of the whole job: SIGSTOP, a suspended Slurm step, a paused virtual
// machine.
#ifndef KUNGFU_BASE_RUN_TIME_H_
#define KUNGFU_BASE_RUN_TIME_H_

#include <algorithm>
#include <chrono>

namespace kungfu {

// Measures how long a wait has lasted, without the pauses in which this process didn't run.
//
// Every clock continues while a process is stopped. After a pause, a waiting thread would therefore find that its
// deadline has passed, although the awaited rank was stopped as well and couldn't arrive.
//
//  1. A waiting thread reads the clock at least every kLongestSlice, because it sleeps in slices and reads the clock
//     between them.
//  2. So if two reads are more than kMostGap apart, this thread didn't run for part of that time. Only kMostGap of it
//     is counted. (Test: RunTime.APauseCountsAsOneGap.)
//  3. A pause of any length costs the awaited rank at most kMostGap of its time. After the pause, the rank has the
//     rest of the time limit to publish its data.
//  4. A wait still ends. Each read counts either the whole time since the last read or kMostGap, and any thread that
//     runs reads again. A machine with too few cores makes deadlines longer, never shorter.
//
// The state is local to one wait: no thread depends on what another thread reads. Not thread-safe.
class RunTime {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr auto kLongestSlice = std::chrono::milliseconds(100);
  static constexpr auto kMostGap = std::chrono::milliseconds(500);

  explicit RunTime(Clock::time_point now = Clock::now()) : looked_(now) {}

  // Reads the clock and returns how long the wait has lasted. `now` must never go back.
  Clock::duration Look(Clock::time_point now = Clock::now()) {
    ran_ += std::min<Clock::duration>(now - looked_, kMostGap);
    looked_ = now;
    return ran_;
  }
  // Returns how long the wait had lasted at the last call of Look.
  Clock::duration ran() const { return ran_; }

 private:
  Clock::time_point looked_;
  Clock::duration ran_ = Clock::duration::zero();
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_RUN_TIME_H_
