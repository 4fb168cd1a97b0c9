// Deadlines that stop while the whole job is paused (for example by SIGSTOP, in a suspended Slurm
// step, or in a paused virtual machine).
#ifndef KUNGFU_BASE_RUN_TIME_H_
#define KUNGFU_BASE_RUN_TIME_H_

#include <algorithm>
#include <chrono>

namespace kungfu {

// Measures how long a wait has lasted, excluding the time during which this process was stopped.
//
// Every clock continues while a process is stopped. With an ordinary clock, a waiting thread's
// deadline could pass during a pause, although the rank that it waits for was stopped as well.
//
//  1. A waiting thread reads the clock at least every kLongestSlice, because it sleeps in slices and reads the clock
//     between two slices.
//  2. So if two reads are more than kMostGap apart, this thread didn't run for part of the time between them. Only
//     kMostGap of this time is counted. (Test: RunTime.APauseCountsAsOneGap.)
//  3. A pause of any length uses up at most kMostGap of the time limit. After the pause, the other rank has the rest
//     of the time limit to publish its data.
//  4. A wait still ends. Each read counts either the whole time since the last read or kMostGap, and any thread that
//     runs will read the clock again. A machine with too few cores makes deadlines longer, never shorter.
//
// Not thread-safe.
class RunTime {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr auto kLongestSlice = std::chrono::milliseconds(100);
  static constexpr auto kMostGap = std::chrono::milliseconds(500);

  explicit RunTime(Clock::time_point now = Clock::now()) : looked_(now) {}

  // Reads the clock and returns how long the wait has lasted. `now` must never be earlier than in
  // the previous call.
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
