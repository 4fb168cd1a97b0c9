// Ranks that wait for each other in different operations.
//
// If one rank waits in operation A, and another one never begins A because it waits in B, both wait
// until a deadline, though both facts are in the segment. So each process reports the operations
// that its threads wait in. A process that reads reports of all ranks, by which no rank can go on,
// ends the communicator with a mismatch. An error although the ranks are only slow would be worse
// than the wait. Hence the argument:
//
// 1. *Still*. A process stands still if each of its threads either waits in an operation (a Wait
// here) or sleeps in the kernel, and the program's main thread is in such a wait, or in a call of
// MindSpore's that waits for kernels. The caller of Look judges that (runtime/stillness.h,
// ms_kungfu/membership/deadlocks.py). A thread that is runnable and gets no core, that is in a page
// fault, stopped or traced, doesn't sleep. A process with threads of the user's own, which may
// begin anything at any time, never stands still. Neither does one that computes on a device, whose
// work isn't seen here.
// Test: Deadlock.IsNotFoundInProgramsOfOneOrder
//
// 2. A report says that its process stood still in kLooks or more consecutive looks, from `since`
// to `now`, in the same waits, with the same failures, and ended no operation meanwhile. So it
// stood still at every moment between, except for what no look saw.
// Test: Deadlock.IsNotFoundInProgramsOfOneOrder
//
// 3. A process that concludes has read a report of each living rank. All have the number of
// failures that it knows itself, and the latest `since` isn't after the earliest `now`. At that
// moment T all processes stood still at once.
// Test: Deadlock.IsNotConcludedWithoutARankUntilItHasFailed
//
// 4. A Wait takes its process's report back before its thread leaves the operation. So if a report
// is unchanged after the posts were read, its waits were still open then, and the channels still
// those of their names.
// Test: Deadlock.IsNotFoundInProgramsOfOneOrder
//
// 5. Each reported operation lacks the post of a living member. Posts are only added, so it lacked
// it at T too. No operation that a rank waits in can end for a failure that happened before T (3),
// and none can end otherwise.
// Test: Deadlock.IsFoundAtAllRanksWhereOneHasAnOperationOfItsOwn
//
// 6. Hence at T no thread of any rank could run, and no other rank would wake one: that takes a
// post (5) or a failure. Operations in the background are covered: the one that runs is a Wait of
// its thread, those behind it come after it. Waits for staging buffers, turns of a name or the
// table of names end by the end of an operation, or by a thread that runs. Events from outside (a
// timer, data) could wake a thread only in a process that (1) excludes.
// Test: Deadlock.IsFoundAtAllRanksWhereOneHasAnOperationOfItsOwn
//
// 7. A failure after T ends no operation that this error is wrong about: at T the ranks that lived
// were in different operations already.
// Test: Deadlock.IsNotConcludedWithoutARankUntilItHasFailed
//
// 8. A rank that hasn't joined, has left, is busy alone (ControlBlock::IsBusy), is frozen, or looks
// for no deadlock (a program without Python) doesn't report. Then no rank concludes anything.
// Test: Deadlock.IsNotConcludedWhileARankIsBusyAlone
//
// All ranks come to the same conclusion and report the same text. This holds among the ranks of one
// host only.
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

// Thread-safe. Of one communicator.
class DeadlockWatch {
 public:
  static constexpr uint32_t kLooks = 5;

  explicit DeadlockWatch(const Endpoint& self) : self_(self), works_(self.options.tells && !self.options.behind_it) {}

  // For as long as it lives the calling thread waits in this operation.
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

  // `place`: where the program is, in words, or empty. Returns the text of a mismatch if all ranks wait for ever.
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
  uint32_t looks_ = 0;  // in a row that found the same
  uint64_t changes_ = 0, seen_changes_ = 0;
  uint64_t seen_operations_ = 0;
  uint32_t seen_num_failed_ = 0;
  uint64_t since_ns_ = 0;
};

// The threads of this process that wait in operations slowly, whatever the communicator; so that a thread may sleep
// until there is one. Thread-safe, and never destroyed: a thread may be inside until the process ends.
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
