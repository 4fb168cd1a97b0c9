// Deadlines that survive a pause of the whole job: SIGSTOP, a suspended Slurm step, a paused virtual machine.
#ifndef KUNGFU_BASE_RUN_TIME_H_
#define KUNGFU_BASE_RUN_TIME_H_

#include <algorithm>
#include <chrono>

namespace kungfu {

// For how long a wait has lasted, without the pauses in which this process did not run.
//
// Every clock goes on while a process is stopped. A waiter that wakes up behind a pause would therefore find its
// deadline passed, though the rank that it waits for was stopped as well and could not arrive.
//
//  1. A waiter looks at least every kLongestSlice: it sleeps in slices, and looks between any two of them.
//  2. So two looks that are further apart than kMostGap have time between them in which this thread did not run. Of
//     that distance only kMostGap counts. (Test: RunTime.APauseCountsAsOneGap.)
//  3. A pause costs the awaited rank at most kMostGap of its time, however long it is. Whatever that rank publishes
//     when it goes on, it has the rest of the limit to do so.
//  4. A wait still ends. Each look counts the time since the last one in full or kMostGap; a thread that runs at all
//     looks again. A machine that is short of cores makes deadlines longer, never shorter.
//
// State is local to a wait: no thread depends on another one's looks. Not thread-safe.
class RunTime {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr auto kLongestSlice = std::chrono::milliseconds(100);
  static constexpr auto kMostGap = std::chrono::milliseconds(500);

  explicit RunTime(Clock::time_point now = Clock::now()) : looked_(now) {}

  // How long the wait has lasted. A look; `now` never goes back.
  Clock::duration Look(Clock::time_point now = Clock::now()) {
    ran_ += std::min<Clock::duration>(now - looked_, kMostGap);
    looked_ = now;
    return ran_;
  }
  // As of the last look.
  Clock::duration ran() const { return ran_; }

 private:
  Clock::time_point looked_;
  Clock::duration ran_ = Clock::duration::zero();
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_RUN_TIME_H_
