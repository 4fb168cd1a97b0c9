// The device of this process and its collectives.
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

// One thread launches everything, so that all ranks launch the same in the same order, whatever order and threads their
// callers come in; how they agree on that, see Session.
//
// Thread-safe.
class Device {
 public:
  // `engine` is null if the vendor's library is missing, and `why_no_engine` says so. Both are never freed: a
  // bring-up that was given up may still be using them.
  Device(Driver& driver, Engine* engine, std::string why_no_engine, const Options& options);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  Driver& driver() { return tools_.driver; }

  // Queues it and gives the ticket to wait with; 0 if it is done as far as `stream` is concerned.
  uint64_t Start(std::shared_ptr<Communicator> communicator, const Operation& operation, Stream stream);
  // Waits until all have ended, all with the same ranks, and throws the error of the first that failed.
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
  std::unordered_map<uint64_t, JobPtr> by_ticket_;   // guarded by mutex_; not waited for yet
  std::unordered_map<uint64_t, uint32_t> sequence_;  // guarded by mutex_; of each name in `sequence_of_`
  std::weak_ptr<Communicator> sequence_of_;          // guarded by mutex_
  uint64_t last_ticket_ = 0;                         // guarded by mutex_
  bool stopping_ = false;                            // guarded by mutex_
  std::string engine_in_use_ = "none yet";           // guarded by mutex_
  std::optional<Place> place_;                       // guarded by mutex_; of all callers
  std::thread thread_;                               // guarded by mutex_

  SessionTools tools_;
};

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_DEVICE_H_
