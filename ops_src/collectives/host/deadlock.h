// Detection of deadlocks, in which ranks wait for each other in different operations.
//
// Suppose that one rank waits in operation A, and another rank never begins A because it waits in
// operation B. Both ranks would wait until a deadline, although the segment contains both facts. So
// each process reports the operations in which its threads wait. A process reads the reports of all
// ranks. If they show that no rank can continue, the process closes the communicator with a
// mismatch error. Such an error would be worse than the wait if the ranks were only slow. The
// following invariants exclude that:
//
// 1. *Standing still*. A process stands still if two conditions hold. Each of its threads either
// waits in an operation (a Wait in this file) or sleeps in the kernel. The program's main thread is
// in such a Wait, or in a call of MindSpore that waits for kernels. The caller of Look checks the
// conditions (runtime/stillness.h, ms_kungfu/membership/deadlocks.py). A thread doesn't sleep if it
// is runnable without getting a core, in a page fault, stopped or traced. A process with threads of
// the user's own never stands still, because these may begin anything at any time. A process that
// computes on a device never stands still either, because its work isn't visible here.
// Test: Deadlock.IsNotFoundInProgramsOfOneOrder
//
// 2. A report says that its process stood still in at least kLooks consecutive looks, from time
// `since` to time `now`. In all these looks, the process was in the same waits, knew the same
// failures, and had ended no operation in between. So it stood still at every moment in between,
// except for changes that no look could detect.
// Test: Deadlock.IsNotFoundInProgramsOfOneOrder
//
// 3. A process that concludes a deadlock has read a report of each living rank. All reports have
// the number of failures that this process knows itself. The latest `since` isn't after the
// earliest `now`. So there was a moment T at which all processes stood still.
// Test: Deadlock.IsNotConcludedWithoutARankUntilItHasFailed
//
// 4. When a Wait ends, it withdraws the report of its process before its thread leaves the
// operation. So if a report is unchanged after the posts were read, its waits had not ended at that
// time. Their channels still belonged to the same names.
// Test: Deadlock.IsNotFoundInProgramsOfOneOrder
//
// 5. In each reported operation, the post of a living member is missing. Posts are only added, so
// the post was missing at T too. A failure before T can't end an operation in which a rank waits
// (3), and nothing else can end it.
// Test: Deadlock.IsFoundAtAllRanksWhereOneHasAnOperationOfItsOwn
//
// 6. Hence at T no thread of any rank could run, and no other rank would wake a thread. Only a post
// (excluded by 5) or a failure wakes a thread. Background operations are included: the running
// operation is a Wait of its thread, and queued operations begin after it. Some threads wait for
// staging buffers, for their turn with a name, or for the channel table. These waits end when an
// operation ends, or when a running thread continues. External events (a timer, data) could wake a
// thread only in a process that 1 excludes.
// Test: Deadlock.IsFoundAtAllRanksWhereOneHasAnOperationOfItsOwn
//
// 7. A failure after T doesn't make the error wrong. At T, the ranks that were alive had already
// begun different operations.
// Test: Deadlock.IsNotConcludedWithoutARankUntilItHasFailed
//
// 8. If a rank doesn't report, no rank concludes a deadlock. A rank doesn't report if it hasn't
// joined, has left, is busy alone (ControlBlock::IsBusy), or is frozen. A rank doesn't report
// either if it never looks for deadlocks (a program without Python).
// Test: Deadlock.IsNotConcludedWhileARankIsBusyAlone
//
// All ranks reach the same conclusion and report the same text. Only ranks of the same host are
// considered.
#ifndef KUNGFU_COLLECTIVES_HOST_DEADLOCK_H_
#define KUNGFU_COLLECTIVES_HOST_DEADLOCK_H_

#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/host/endpoint.h"
#include "collectives/host/flight.h"

namespace kungfu::host {

// Detects deadlocks of one communicator. Thread-safe.
class DeadlockWatch {
 public:
  static constexpr uint32_t kLooks = 5;

  explicit DeadlockWatch(const Endpoint& self) : self_(self), works_(self.options.tells && !self.options.behind_it) {}

  // Registers, for the lifetime of this object, that the calling thread waits in an operation.
  class Wait {
   public:
    Wait(DeadlockWatch& watch, const Flight& flight);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    DeadlockWatch& watch_;
    bool listed_ = false;
  };

  // Checks for a deadlock. Returns the text of a mismatch error if all ranks wait forever. `place` describes where the
  // program is, or is empty.
  std::optional<std::string> Look(bool stands_still, const std::string& place);

 private:
  struct Open {
    uint32_t channel, sequence, generation;
    std::string what;
    const Wait* of;
  };
  struct Read;

  void Report(const std::string& place, uint32_t num_failed);
  void TakeBack();
  std::optional<Read> ReadOf(uint32_t rank) const;
  bool LacksPost(uint64_t place, uint32_t generation) const;
  std::optional<std::string> Conclude(uint32_t num_failed) const;

  const Endpoint& self_;
  const bool works_;
  std::mutex mutex_;
  // All guarded by mutex_:
  std::vector<Open> waits_;
  bool reported_ = false;
  uint32_t looks_ = 0;  // consecutive looks without a change
  uint64_t changes_ = 0, seen_changes_ = 0;
  uint64_t seen_operations_ = 0;
  uint32_t seen_num_failed_ = 0;
  uint64_t since_ns_ = 0;
};

// The threads of this process that have waited in an operation for long, in any communicator. With AwaitOne, a thread
// sleeps until there is at least one. Thread-safe. The object is never destroyed, because a thread may use it until the
// process ends.
class SlowThreads {
 public:
  static SlowThreads& Get();

  void Enter(pid_t thread);
  void Leave(pid_t thread);
  std::vector<pid_t> All();
  void AwaitOne();

 private:
  struct State;
  SlowThreads();
  State& state_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_DEADLOCK_H_
