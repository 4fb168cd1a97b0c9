// Detects deadlocks in which ranks wait for each other in different operations.
//
// Suppose that one rank waits in operation A, and another rank never begins A because it waits in
// operation B. Both ranks would wait until a deadline. So each process reports the operations in
// which its threads wait, and reads the reports of all ranks. If the reports show that no rank can
// continue, the process closes the communicator with a mismatch error. The following invariants
// ensure that this error never occurs while ranks are only slow:
//
// 1. *Idle processes*. A process is idle if two conditions hold. First, each of its threads either
// waits in an operation (class Wait) or sleeps in the kernel. Second, the program's main thread
// waits in an operation, or in a call to MindSpore that waits for kernels. The caller of Look
// checks the conditions (runtime/stillness.h, ms_kungfu/membership/deadlocks.py). A thread isn't
// sleeping if it waits for a core, is in a page fault, or is stopped or traced. A process is never
// idle if the user's program has started threads in it, because these threads may become active at
// any time. A process that computes on a device is never idle either, because this class can't see
// that work.
// Test: Deadlock.IsNotFoundInProgramsOfOneOrder
//
// 2. A report states that its process was idle in at least kLooks consecutive calls of Look, from
// time `since` to time `now`. In all these calls, the process had the same waits, knew the same
// failures, and had ended no further operation. So the process was idle during the whole time,
// except for changes that Look can't detect.
// Test: Deadlock.IsNotFoundInProgramsOfOneOrder
//
// 3. A process concludes that there is a deadlock only after it has read a report of each running
// rank. Each of these reports contains the number of failures that this process knows. The latest
// `since` isn't later than the earliest `now`. So there was a moment T at which all processes were
// idle.
// Test: Deadlock.IsNotConcludedWithoutARankUntilItHasFailed
//
// 4. A rank *posts* when it begins an operation. The destructor of Wait withdraws the process's
// report before the thread leaves the operation. So if a report is unchanged after the posts were
// read, the reported waits had not ended when the posts were read. The channels of these waits
// still belonged to the same names.
// Test: Deadlock.IsNotFoundInProgramsOfOneOrder
//
// 5. In each reported operation, a running member hasn't posted. Posts are never withdrawn, so this
// member hadn't posted at T either. By 3, no failure before T can end the operation, and no other
// event could end it.
// Test: Deadlock.IsFoundAtAllRanksWhereOneHasAnOperationOfItsOwn
//
// 6. So at T no thread of any rank could run, and no rank could wake a thread. Only a post
// (excluded by 5) or a failure wakes a thread. The same is true for background operations: the
// thread of the running operation has a Wait object, and queued operations begin later. A wait for
// a staging buffer, for a name, or for the channel table ends only when an operation ends or when a
// running thread continues. External events (a timer, data) could wake a thread only in a process
// that invariant 1 excludes.
// Test: Deadlock.IsFoundAtAllRanksWhereOneHasAnOperationOfItsOwn
//
// 7. The error is correct even if a rank fails after T. The ranks that were running at T had
// already begun different operations.
// Test: Deadlock.IsNotConcludedWithoutARankUntilItHasFailed
//
// 8. If a rank has no report, no rank concludes that there is a deadlock. A rank has no report in
// these cases: it hasn't joined, it has left, it is busy with work that involves no other rank
// (ControlBlock::IsBusy), it is frozen, or its program never calls Look (a program without Python).
// Test: Deadlock.IsNotConcludedWhileARankIsBusyAlone
//
// All ranks reach the same conclusion and report the same text. Only deadlocks between ranks of the
// same host are detected.
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

// Detects deadlocks between the ranks of one communicator. Thread-safe.
class DeadlockWatch {
 public:
  static constexpr uint32_t kLooks = 5;

  explicit DeadlockWatch(const Endpoint& self) : self_(self), works_(self.options.tells && !self.options.behind_it) {}

  // While this object lives, the calling thread is registered as waiting in an operation.
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

  // Checks for a deadlock. Returns the text of a mismatch error if all ranks would wait forever.
  // `place` describes the current position in the program, or is empty.
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
  // `mutex_` guards these members.
  std::vector<Open> waits_;
  bool reported_ = false;
  uint32_t looks_ = 0;  // number of consecutive looks without a change
  uint64_t changes_ = 0, seen_changes_ = 0;
  uint64_t seen_operations_ = 0;
  uint32_t seen_num_failed_ = 0;
  uint64_t since_ns_ = 0;
};

// The threads of this process that have waited in an operation for a long time, in any
// communicator. AwaitOne waits until there is at least one of these threads. Thread-safe. The
// object is never destroyed, because a thread may use it until the process ends.
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
