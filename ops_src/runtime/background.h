// Runs operations while their caller does other work: one call starts an operation, and another call waits for it.
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

// One thread that runs operations in the order of their starts. This order must be the same at all ranks, as with
// blocking calls. One rank may start an operation here while another rank makes a blocking call, if the order is the
// same.
//
// Ownership. Start copies the inputs into memory of the pending operation, because MindSpore frees a failed graph's
// tensors at any time, without notice to a kernel. The caller's outputs are written only inside Wait, where the waiting
// caller keeps them alive. If the thread begins the operation during Wait, it writes the outputs directly. Otherwise it
// writes the results into memory of the pending operation, and Wait copies them. The inputs stay intact until Wait has
// returned, so that the operation can be repeated without a failed rank.
//
// Costs. Start copies the inputs once, and Wait copies the results at most once. Twice the operation's bytes stay
// allocated while this object lives. The memory is kept for the next operation of the same name, because new pages from
// the system cost more than the copies. In a cluster of one there are no such costs: Start does the same as a blocking
// call.
//
// Operations of one wait end with the same ranks. If a rank failed between two of them, the waiting thread repeats the
// earlier ones without that rank, from the copied inputs.
//
// If no caller waits for an operation because its step failed, the operation still runs, because the other ranks need
// this rank's contribution. It is freed when the next operation with its name and dtype starts.
//
// Thread-safe. The thread is started by the first operation that needs it, and ends in Stop. It sleeps while there is
// no operation. A forked child has no such thread: it can't start operations, and Stop does nothing there.
class Background {
 public:
  Background() = default;
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Starts an all-reduce; no other operation is supported. Returns the ticket for Wait. Returns 0 in a cluster of one,
  // where Start writes the outputs. In larger clusters it doesn't use the outputs. Throws Error.
  uint64_t Start(std::shared_ptr<Communicator> communicator, const Operation& operation);
  // Waits until all these operations have ended and their results are in the given outputs. Throws the error of the
  // first failed operation. A ticket is valid for one call, with the tensors of its start.
  void Wait(const kf_started* started, size_t num_started);
  // Ends the thread after the queued operations. To avoid the wait, close the communicators first. A concurrent Start
  // waits until the thread has ended.
  void Stop() noexcept;
  // Whether this object is a forked child's copy, which can't be used.
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
  std::unordered_map<std::string, PendingPtr> by_key_;  // guarded by mutex_; the last operation of each name and dtype
  std::unordered_map<uint64_t, PendingPtr> by_ticket_;  // guarded by mutex_; operations that aren't waited for yet
  uint64_t last_ticket_ = 0;                            // guarded by mutex_
  bool stopping_ = false;                               // guarded by mutex_
  std::unique_ptr<std::thread> thread_;                 // guarded by mutex_
  const OneProcess process_;
};

// For tests: makes each all-reduce of the C ABI take this much longer. Zero, the default, costs one load.
void SetDelayForTests(uint32_t milliseconds);
void DelayForTests();

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_BACKGROUND_H_
