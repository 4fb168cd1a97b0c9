// The joint work of the ranks of one cluster version on their devices.
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
  RunTime waited;               // time since the launch at this rank; read in each cycle
  Mark ready;                   // the point on the caller's stream after which the inputs are ready
  std::unique_ptr<Block> kept;  // the inputs of a reduction in place, in case it must be repeated
  bool by_staging = false;
  std::optional<Error> failure;  // a failure of this rank's device that the other ranks don't know of yet

  // Guarded by the device's mutex:
  bool ended = false;
  std::optional<Error> error;
  uint32_t members = 0;  // number of ranks that contributed
};
using JobPtr = std::shared_ptr<Job>;

struct Options {
  kf_engine engine = KF_ENGINE_AUTO;
  size_t chunk_bytes = size_t{4} << 20;
  std::chrono::milliseconds timeout{600000};
};

// The resources that a session uses and then passes to the next session. The device owns them, and only its thread
// uses them.
struct SessionTools {
  Driver& driver;
  Engine* const engine;  // null if its library is missing; why_no_engine tells the reason
  const std::string why_no_engine;
  const Options options;
  // Called when an operation has ended: `members` ranks contributed, or it failed with `error`.
  const std::function<void(const JobPtr& job, const Error* error, uint32_t members)> end;
  const std::function<void(const std::string& text)> note_engine;
  Stream stream = nullptr;
  std::unique_ptr<Staging> staging;
};

// Runs on the device's thread only. The session works in cycles, and all ranks are always in the same cycle:
//
//   order   The ranks gather which operations each rank has ready, identified by name and number under that name.
//           Operations that are ready at all ranks are launched, in the order of the lowest living rank's list.
//   launch  The operations run on our own stream, which waits for the callers' streams. If an operation must be ended,
//           the caller's other work isn't affected.
//   outcome Every few milliseconds, the ranks gather the progress of each rank, until all ranks have finished or one
//   has
//           failed. So no rank keeps a result that another rank lacks. After a failure, the survivors end the device
//           communicator and repeat the operations by staging, with the runtime's own recovery.
//
// All decisions follow from gathers, which give every rank the same values. No rank decides anything alone.
//
// A communicator of the vendor's library belongs to one of our communicators, and so to one cluster version. The first
// operation brings it up. If it has lost a rank, it isn't brought up again: the next version brings up a new one.
class Session {
 public:
  // The maximum number of operations that a rank can have started.
  static constexpr uint32_t kMostReady = 256;

  Session(SessionTools& tools, std::shared_ptr<Communicator> communicator);

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  // Runs one cycle over this rank's jobs (at most kMostReady). Returns false if no job is ready at all ranks.
  bool RunCycle(const std::vector<JobPtr>& mine);
  // Ends all work of the device communicator, so that nothing writes to the tensors any more.
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
  size_t members_;  // number of ranks in the last gather
  bool engine_chosen_ = false;
  bool by_staging_ = false;  // true: all operations go through staging
  std::unique_ptr<DeviceCommunicator> vendors_;
};

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_SESSION_H_
