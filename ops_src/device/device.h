// The device of this process and its collectives.
#ifndef KUNGFU_DEVICE_DEVICE_H_
#define KUNGFU_DEVICE_DEVICE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collectives/communicator.h"
#include "device/driver.h"
#include "device/staging.h"

namespace kungfu::device {

struct Options {
  kf_engine engine = KF_ENGINE_AUTO;
  size_t chunk_bytes = size_t{4} << 20;
  std::chrono::milliseconds timeout{600000};
};

// One thread launches everything, so that all ranks launch the same in the same order, whatever order and threads their
// callers come in. It works in cycles, of which the ranks are always in the same one:
//
//   order   Each rank gathers what every rank has ready, by name and number under that name. What all have is launched,
//           in the order in which the lowest living rank lists it.
//   launch  On a stream of our own, which waits for the callers' streams: an operation that has to be given up must not
//           take the caller's other work with it.
//   verdict The ranks gather how far each of them is, every few milliseconds, until all have finished, one has failed
//   or
//           one has died. So no rank takes a result for good that another has not got. After a death the survivors give
//           the team up and do the same operations again by staging, where the runtime's own recovery works.
//
// Everything is decided from gathers, and these give every rank the same answer: no rank decides anything alone.
//
// A team of the vendor's library belongs to one communicator, i.e. one cluster version, and is brought up by the first
// operation in it. One that has lost a rank is not brought up again: the next version brings a new one.
//
// Thread-safe.
class Device {
 public:
  // `engine` is null where the vendor's library is missing, and `why_no_engine` says so. Both are never freed: a
  // bring-up that was given up may still be using them.
  Device(Driver& driver, Engine* engine, std::string why_no_engine, const Options& options);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  Driver& driver() { return driver_; }

  // Queues it and gives the ticket to wait with; 0 where it is done as far as `stream` is concerned.
  uint64_t Start(std::shared_ptr<Communicator> communicator, const Operation& operation, Stream stream);
  // Waits until all have ended, all with the same ranks, and throws the error of the first that failed.
  void Wait(const uint64_t* tickets, size_t num_tickets);

  std::string EngineInUse() const;

 private:
  struct Job;
  struct Session;  // what belongs to one communicator; the thread's
  using JobPtr = std::shared_ptr<Job>;
  enum class Verdict { kDone, kFailed, kDied };

  void RunAlone(const Operation& operation, Stream stream);
  uint64_t Enqueue(JobPtr job);
  void EnsureThread(const Place& place);
  void Loop(Place place);

  void Cycle(Session& session, const std::vector<JobPtr>& mine);
  std::vector<JobPtr> Order(Session& session, const std::vector<JobPtr>& mine);
  void ReportMismatch(Session& session, Job& job);
  void Meet(Session& session);
  void BringUp(Session& session);
  void RunBatch(Session& session, const std::vector<JobPtr>& jobs);
  bool RunByEngine(Session& session, const std::vector<JobPtr>& jobs);
  void RunByStaging(Session& session, const std::vector<JobPtr>& jobs);
  Verdict Rounds(Session& session, const std::function<bool()>& done, Error* failure);
  void GiveUp(Session& session, const std::vector<JobPtr>& jobs);
  void SaveInputs(const JobPtr& job);
  void End(const JobPtr& job, const Error* error, uint32_t members);
  void UseStaging(Session& session, const std::string& why);
  void NoteEngine(const std::string& text);

  Driver& driver_;
  Engine* const engine_;
  const std::string why_no_engine_;
  const Options options_;

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

  // The thread's:
  Stream stream_ = nullptr;
  std::unique_ptr<Staging> staging_;
};

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_DEVICE_H_
