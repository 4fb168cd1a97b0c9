// What the ranks of one cluster version do with their devices, together.
#ifndef KUNGFU_DEVICE_SESSION_H_
#define KUNGFU_DEVICE_SESSION_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/run_time.h"
#include "collectives/communicator.h"
#include "device/driver.h"
#include "device/staging.h"

namespace kungfu::device {

// One operation over device memory.
struct Job : KeptOperation {
  std::shared_ptr<Communicator> communicator;
  uint64_t key = 0;
  uint64_t signature = 0;
  uint32_t sequence = 0;
  RunTime waited;               // since it has been launched here; looked at in each cycle
  Mark ready;                   // on the caller's stream
  std::unique_ptr<Block> kept;  // the inputs of a reduction in place, for doing it again
  bool by_staging = false;
  std::optional<Error> failure;  // of this rank's device, before the others know

  // Guarded by the device's mutex:
  bool ended = false;
  std::optional<Error> error;
  uint32_t members = 0;  // that took part
};
using JobPtr = std::shared_ptr<Job>;

struct Options {
  kf_engine engine = KF_ENGINE_AUTO;
  size_t chunk_bytes = size_t{4} << 20;
  std::chrono::milliseconds timeout{600000};
};

// What a session works with and leaves to the next one. Its device's, and used by the device's thread.
struct SessionTools {
  Driver& driver;
  Engine* const engine;  // null: its library is missing, and
  const std::string why_no_engine;
  const Options options;
  // An operation has ended, with this many ranks in it, or failed.
  const std::function<void(const JobPtr& job, const Error* error, uint32_t members)> end;
  const std::function<void(const std::string& text)> note_engine;
  Stream stream = nullptr;
  std::unique_ptr<Staging> staging;
};

// One thread, the device's. It works in cycles, of which the ranks are always in the same one:
//
//   order   Each rank gathers what every rank has ready, by name and number under that name. What all have is launched,
//           in the order in which the lowest living rank lists it.
//   launch  On a stream of our own, which waits for the callers' streams: an operation that has to be given up must not
//           take the caller's other work with it.
//   outcome The ranks gather how far each of them is, every few milliseconds, until all have finished, one has failed
//           or one has died. So no rank keeps a result that another one lacks. After a failure the survivors
//           give the device communicator up and do the same operations again by staging, where the runtime's own
//           recovery works.
//
// Everything is decided from gathers, and these give every rank the same answer: no rank decides anything alone.
//
// A communicator of the vendor's library belongs to one of ours, i.e. one cluster version, and is brought up by the
// first operation in it. One that has lost a rank is not brought up again: the next version brings a new one.
class Session {
 public:
  // As many operations as a rank can have under way.
  static constexpr uint32_t kMostReady = 256;

  Session(SessionTools& tools, std::shared_ptr<Communicator> communicator);

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  // One cycle over this rank's jobs, at most kMostReady. False: no job is ready at all ranks.
  bool RunCycle(const std::vector<JobPtr>& mine);
  // Ends what the device communicator has begun, so that nothing writes into the tensors any more.
  void GiveUp(const std::vector<JobPtr>& jobs);

 private:
  enum class Outcome { kDone, kFailed, kPeerFailed };

  std::vector<JobPtr> Order(const std::vector<JobPtr>& mine);
  void ReportMismatch(const JobPtr& job);
  void ChooseEngine();
  void BringUp();
  void RunBatch(const std::vector<JobPtr>& jobs);
  bool RunByEngine(const std::vector<JobPtr>& jobs);
  void RunByStaging(const std::vector<JobPtr>& jobs);
  Outcome Rounds(const std::function<bool()>& done, Error* failure);
  void SaveInputs(const JobPtr& job);
  void UseStaging(const std::string& why);

  SessionTools& tools_;
  const std::shared_ptr<Communicator> communicator_;
  size_t members_;  // ranks that were in the last gather
  bool engine_chosen_ = false;
  bool by_staging_ = false;  // all of it
  std::unique_ptr<DeviceCommunicator> vendors_;
};

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_SESSION_H_
