// Ranks that wait for each other in different operations.
//
// Where one rank waits in operation A, which another one never comes to because it waits in B, both wait until a
// deadline, though both facts are in the segment. Each process reports the operations that its threads wait in, and one
// that reads reports of all ranks by which nothing can go on ends the communicator with a mismatch. An error where the
// ranks only are slow would be worse than the wait. Hence the argument, by number:
//
//  1. *Still*. A process stands still if each of its threads either waits in an operation (a Wait here) or sleeps in
//     the kernel, and the program's main thread is in such a wait, or in a call of MindSpore's that waits for kernels.
//     The caller of Look judges that (runtime/stillness.h, ms_kungfu/membership/deadlocks.py): a thread that is
//     runnable and gets no core, that is in a page fault, stopped or traced, doesn't sleep; a process with threads of
//     the user's own, which may bring anything at any time, never stands still; nor does one that computes on a device,
//     whose work isn't seen here.
//  2. A report says that its process stood still in all of kLooks looks or more, one after another, from `since` to
//     `now`, in the same waits, with the same deaths, and ended no operation meanwhile. So it did at every moment
//     between, up to what no look saw.
//  3. A process that concludes has read a report of each living rank, all of them with the number of deaths that it
//     knows itself, and the latest `since` isn't after the earliest `now`. At that moment T all processes stood still
//     at once.
//  4. A Wait takes its process's report back before its thread leaves the operation. So where a report is unchanged
//     after the posts have been looked at, its waits were still open then, and the channels still those of their names.
//  5. Each reported operation lacks the post of a living member. Posts are only added: it lacked it at T as well. No
//     operation that is waited in can end for a death that happened before T (3), and none can end otherwise.
//  6. Hence at T no thread of any rank could run, and none would be woken by another rank's: that takes a post (5), or
//     a death. Operations in the background are covered: the one that runs is a Wait of its thread's, those behind it
//     come after it. Waits for lanes, turns of a name or the table of names end by the end of an operation, or by a
//     thread that runs. What comes from outside (a timer, data) could wake a thread only in a process that (1)
//     excludes.
//  7. A death after T ends no operation that this error is wrong about: at T the ranks that lived were in different
//     operations already.
//  8. A rank that hasn't joined, has left, is busy alone (Board::IsBusy), is frozen, or looks for no deadlock (a
//     program without Python), doesn't report, and then no rank concludes anything.
//
// All ranks come to the same conclusion and say the same. tests/cpp/deadlock_test.cc runs random programs, right ones
// and wrong ones. Only among the ranks of one host.
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

  // `place`: where the program is, in words, or empty. Returns the text of a mismatch where all ranks wait for ever.
  std::optional<std::string> Look(bool stands_still, const std::string& place);

 private:
  struct Open {
    uint32_t channel, sequence, generation;
    std::string what;
    const Wait* of;
  };
  struct Read;

  void Report(const std::string& place, uint32_t deaths);
  void TakeBack();
  std::optional<Read> ReadOf(uint32_t rank) const;
  bool LacksPost(uint64_t place, uint32_t generation) const;
  std::optional<std::string> Conclude(uint32_t deaths) const;

  const Endpoint& self_;
  const bool works_;
  std::mutex mutex_;
  // All guarded by mutex_:
  std::vector<Open> waits_;
  bool reported_ = false;
  uint32_t looks_ = 0;  // in a row that found the same
  uint64_t changes_ = 0, seen_changes_ = 0;
  uint64_t seen_operations_ = 0;
  uint32_t seen_deaths_ = 0;
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
