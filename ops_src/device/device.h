// The device that this process uses, and the collectives on it.
#ifndef KUNGFU_DEVICE_DEVICE_H_
#define KUNGFU_DEVICE_DEVICE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collectives/communicator.h"
#include "device/driver.h"
#include "device/session.h"

namespace kungfu::device {

// Runs all device operations of this process on one thread. All ranks agree on the order (see
// Session), even if their callers use different orders and threads.
//
// Thread-safe.
class Device {
 public:
  // If the vendor's library is missing, `engine` is null and `why_no_engine` gives the reason.
  // `driver` and `engine` are never freed, because a vendor's communicator whose start was
  // abandoned may still use them.
  Device(Driver& driver, Engine* engine, std::string why_no_engine, const Options& options);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  Driver& driver() { return tools_.driver; }

  // Queues the operation and returns its ticket for `Wait`. Returns 0 if all the operation's work
  // is already enqueued on `stream`.
  uint64_t Start(std::shared_ptr<Communicator> communicator, const Operation& operation, Stream stream);
  // Waits until all operations have ended with the same contributing ranks. If an operation failed,
  // throws the error of the first one.
  void Wait(const uint64_t* tickets, size_t num_tickets);

  std::string EngineInUse() const;

 private:
  void RunAlone(const Operation& operation, Stream stream);
  uint64_t Enqueue(JobPtr job);
  void EnsureThread(const Place& place);
  void Loop(Place place);
  void AwaitMore();
  void End(const JobPtr& job, const Error* error, uint32_t members);

  mutable std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable ended_;
  std::deque<JobPtr> queue_;                         // guarded by mutex_
  std::unordered_map<uint64_t, JobPtr> by_ticket_;   // guarded by mutex_; operations that no caller waits for yet
  std::unordered_map<uint64_t, uint32_t> sequence_;  // guarded by mutex_; the next number for each operation name of
                                                     // `sequence_of_`
  std::weak_ptr<Communicator> sequence_of_;          // guarded by mutex_
  uint64_t last_ticket_ = 0;                         // guarded by mutex_
  bool stopping_ = false;                            // guarded by mutex_
  std::string engine_in_use_ = "none yet";           // guarded by mutex_
  std::optional<Place> place_;                       // guarded by mutex_; it must be the same for all callers
  std::thread thread_;                               // guarded by mutex_

  SessionTools tools_;
};

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_DEVICE_H_
