// Operations that go on while their caller does something else: started by one call, waited for by another.
#ifndef KUNGFU_RUNTIME_BACKGROUND_H_
#define KUNGFU_RUNTIME_BACKGROUND_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/forks.h"
#include "collectives/communicator.h"

namespace kungfu {

// One thread that runs operations in the order of their start. That order has to be the same at all ranks, as with
// blocking calls; a rank may also bring a started operation where another brings a blocking one, if the order is the
// same.
//
// Ownership. Start copies the inputs into memory of the pending operation, and the thread writes the results into more
// of it: MindSpore frees a failed graph's tensors at any time, without notice to a kernel. The caller's outputs are
// written only inside Wait, where the caller keeps them alive by waiting: by the thread itself if it begins the
// operation then, else by a copy. The inputs stay intact until Wait has returned, for a step that has to be repeated
// without a rank that failed in it.
//
// That costs one copy of the inputs at Start, at most one of the results in Wait, and twice the operation's bytes for
// as long as this object lives: the memory is kept for the next operation of the same name, since pages from the system
// cost more than the copies. A cluster of one needs none of it: there Start does what a blocking call would.
//
// Operations that are awaited together are settled together: if a rank failed between two of them, those that it
// contributed to are repeated without it, from the copies, by the waiting thread.
//
// An operation that no caller waits for (its step failed) still runs, because the other ranks count on it. It is freed
// when the next one of its name and dtype starts.
//
// Thread-safe. The thread exists from the first operation that needs it until Stop, and sleeps while there is none.
// A forked child has no such thread: it can start nothing, and Stop does nothing there.
class Background {
 public:
  Background() = default;
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // All-reduces only. Returns the ticket to wait with; 0 in a cluster of one, where the outputs are written now. Else
  // no output is looked at. Throws Error.
  uint64_t Start(std::shared_ptr<Communicator> communicator, const Operation& operation);
  // Waits until all these operations have ended and their results are in the outputs named here, then throws the error
  // of the first that failed. Each ticket is good for one call, with the tensors that it was started with.
  void Wait(const kf_started* started, size_t num_started);
  // Ends the thread, after what is queued; a caller in a hurry closes the communicators first. A Start meanwhile
  // waits until it has ended.
  void Stop() noexcept;
  // Whether it is a forked child's, which is of no use.
  bool IsCopy() const { return process_.IsCopy(); }

 private:
  struct Pending;
  using PendingPtr = std::shared_ptr<Pending>;

  PendingPtr NewPending(const std::string& key);
  void EnsureThread(std::unique_lock<std::mutex>& lock);
  void Loop();
  static std::optional<Error> Settle(const std::vector<PendingPtr>& all);
  void WaitFor(Pending& pending);

  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable ended_;
  std::condition_variable stopped_;
  std::deque<PendingPtr> queue_;                        // guarded by mutex_
  std::unordered_map<std::string, PendingPtr> by_key_;  // guarded by mutex_; the last of each name and dtype
  std::unordered_map<uint64_t, PendingPtr> by_ticket_;  // guarded by mutex_; not waited for yet
  uint64_t last_ticket_ = 0;                            // guarded by mutex_
  bool stopping_ = false;                               // guarded by mutex_
  std::unique_ptr<std::thread> thread_;                 // guarded by mutex_
  const OneProcess process_;
};

// Tests only: makes each all-reduce of the C ABI take this much longer. Zero, the default, costs one load.
void SetDelayForTests(uint32_t milliseconds);
void DelayForTests();

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_BACKGROUND_H_
