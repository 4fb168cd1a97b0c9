// The work that the ranks of one cluster version do together on their devices.
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

// One operation on device memory.
struct Job : KeptOperation {
  std::shared_ptr<Communicator> communicator;
  uint64_t key = 0;
  uint64_t signature = 0;
  uint32_t sequence = 0;
  RunTime waited;               // time since the launch on this rank; updated in each cycle
  Mark ready;                   // a point on the caller's stream; the inputs are ready when the stream has passed it
  std::unique_ptr<Block> kept;  // a copy of the inputs of an in-place reduction, in case it must be repeated
  bool by_staging = false;
  std::optional<Error> failure;  // a failure of this rank's device that the other ranks don't know about yet

  // The device's mutex guards these members:
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

// The resources that a session uses, and passes to the next session. The device owns them. Only the
// device's thread uses them.
struct SessionTools {
  Driver& driver;
  Engine* const engine;  // null if its library is missing; why_no_engine then gives the reason
  const std::string why_no_engine;
  const Options options;
  // Called when an operation has ended. Either `members` ranks contributed, or the operation failed
  // with `error`.
  const std::function<void(const JobPtr& job, const Error* error, uint32_t members)> end;
  const std::function<void(const std::string& text)> note_engine;
  Stream stream = nullptr;
  std::unique_ptr<Staging> staging;
};

// Runs only on the device's thread. The session works in cycles of three phases. All ranks are
// always in the same cycle:
//
//  order   The ranks gather the list of operations that each rank has ready. An operation is identified by its name and
//          its number among operations of that name. Operations that are ready on all ranks are launched, in the order
//          of the list of the lowest running rank.
//  launch  The operations run on the runtime's own stream, which waits for the callers' streams. So an operation can be
//          aborted without affecting the caller's other work.
//  outcome Every few milliseconds, the ranks gather each rank's progress, until all ranks have finished or one has
//          failed. So no rank keeps a result that another rank lacks. After a failure, the survivors abort the work of
//          the device communicator. They repeat the operations by staging, with the runtime's own recovery.
//
// Every decision follows from a gather, which gives all ranks the same values.
//
// A device communicator belongs to one communicator of the runtime, and so to one cluster version.
// The first operation starts the device communicator. If it loses a rank, it isn't restarted until
// the next cluster version.
class Session {
 public:
  // The maximum number of started operations per rank.
  static constexpr uint32_t kMostReady = 256;

  Session(SessionTools& tools, std::shared_ptr<Communicator> communicator);

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  // Runs one cycle with this rank's jobs (at most kMostReady). Returns false if no job is ready on
  // all ranks.
  bool RunCycle(const std::vector<JobPtr>& mine);
  // Aborts all work of the device communicator, so that nothing writes to the tensors any more.
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
  bool by_staging_ = false;  // true if all operations go through staging
  std::unique_ptr<DeviceCommunicator> vendors_;
};

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_SESSION_H_
