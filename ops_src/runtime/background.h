// Runs operations while their caller does other work. One call starts an operation, and another
// call waits for it.
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

// One thread that runs operations in the order in which they were started. This order must be the
// same on all ranks, as with blocking calls. One rank may start an operation here while another
// rank makes the matching blocking call.
//
// Ownership. `Start` copies the inputs into memory of the pending operation, because MindSpore may
// free a failed graph's tensors at any time without notifying a kernel. The caller's outputs are
// written only during `Wait`, because the waiting caller keeps them alive. If the thread begins the
// operation during `Wait`, it writes directly to the outputs. Otherwise it writes the results into
// memory of the pending operation, and `Wait` copies them. The copied inputs stay intact until
// `Wait` has returned, so that the operation can be repeated without a failed rank.
//
// Costs. `Start` copies the inputs once, and `Wait` copies the results at most once. Memory for
// twice the operation's bytes stays allocated while this object lives. The next operation with the
// same name reuses the memory, because new pages from the system cost more than the copies. A
// cluster of one rank has none of these costs, because `Start` does the same as a blocking call.
//
// All operations of one `Wait` end with the same ranks. If a rank failed between two of them, the
// waiting thread repeats the earlier ones without that rank, from the copied inputs.
//
// If a step fails, no caller waits for its operations. These operations still run, because the
// other ranks need this rank's contribution. Such an operation is freed when the next operation
// with its name and dtype starts.
//
// Thread-safe. The first operation that needs the thread starts it. The thread sleeps while there
// is no operation, and ends in `Stop`. A forked child has no such thread: it can't start
// operations, and `Stop` does nothing.
class Background {
 public:
  Background() = default;
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Starts an all-reduce (no other operation is supported), and returns its ticket for `Wait`. In a
  // cluster of one rank, writes the outputs and returns 0. In a larger cluster, doesn't write the
  // outputs: `Wait` writes them. Throws Error.
  uint64_t Start(std::shared_ptr<Communicator> communicator, const Operation& operation);
  // Waits until all these operations have ended and their results are in the given outputs. If an
  // operation failed, throws the error of the first one. A ticket is valid for one call. The
  // tensors must be those that were passed to `Start`.
  void Wait(const kf_started* started, size_t num_started);
  // Ends the thread after it has run the queued operations. To avoid waiting for them, close the
  // communicators first. If `Start` is called during `Stop`, `Start` waits until the thread has
  // ended.
  void Stop() noexcept;
  // Returns true if this object is an unusable copy in a forked child.
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
  std::unordered_map<std::string, PendingPtr> by_key_;  // guarded by mutex_; the last operation with each name and
                                                        // dtype
  std::unordered_map<uint64_t, PendingPtr> by_ticket_;  // guarded by mutex_; operations that no caller waits for yet
  uint64_t last_ticket_ = 0;                            // guarded by mutex_
  bool stopping_ = false;                               // guarded by mutex_
  std::unique_ptr<std::thread> thread_;                 // guarded by mutex_
  const OneProcess process_;
};

// For tests: adds this delay to each all-reduce of the C ABI. The default, zero, costs one load.
void SetDelayForTests(uint32_t milliseconds);
void DelayForTests();

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_BACKGROUND_H_
