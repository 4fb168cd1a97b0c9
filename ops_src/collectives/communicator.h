// The interface for the collectives of one cluster version. All other layers use this interface.
#ifndef KUNGFU_COLLECTIVES_COMMUNICATOR_H_
#define KUNGFU_COLLECTIVES_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/forks.h"
#include "collectives/closure.h"
#include "collectives/operation.h"
#include "collectives/reduction_log.h"
#include "transport/control_block.h"

namespace kungfu {

struct CommunicatorOptions {
  std::chrono::milliseconds collective_timeout{600000};
  std::chrono::milliseconds join_timeout{300000};
  // After this time, a waiting rank logs which rank it waits for. It logs again after 2, 4, 8, ...
  // times this time.
  std::chrono::milliseconds tell_after{10000};
  // If true, GiveUp notifies the other ranks. If false, GiveUp only closes this communicator, and
  // the communicator's owner must notify the other ranks.
  bool tells{true};
  // Describes what the host's transport waits for in an operation. The transport is a member of the
  // segment and represents all other hosts. Empty if the segment has no transport.
  std::function<std::string(const Operation&)> behind_it{};
  // The number of 20 ms sleeps after which a wait is registered for deadlock detection
  // (host/deadlock.h). Shorter waits lock no mutex.
  int watched_after{5};
  // The size of one slice of a large all-reduce over several hosts, in bytes. Must be equal on all
  // ranks.
  size_t slice_bytes{1 << 20};
};

// The members of a communicator never change. When the cluster's membership changes, a new
// communicator is created. Every call on the old communicator then throws StaleClusterError.
//
// Subclasses implement the data transfer. HostCommunicator transfers data between the processes of
// one host (host/host_communicator.h), and ClusterCommunicator between hosts
// (hosts/cluster_communicator.h). LoneCommunicator is for a process that belongs to no cluster. For
// all communication except this transfer, all subclasses use the control block in the same way.
//
// *Generation* g consists of the ranks that remain after the first g failures. These ranks
// contribute to an operation that ends in generation g.
//
// Thread-safe. Operations with different names run concurrently on their callers' threads, and
// don't wait for each other. Operations with the same name run one after another, in a fixed order:
// the k-th operation with a name on one rank matches the k-th operation with that name on every
// other rank.
//
// After a fork, the child's copy of a communicator refuses every call that would act on behalf of the parent process.
// See base/forks.h.
class Communicator {
 public:
  // An operation whose inputs depend on which ranks contribute to it.
  class Renewable {
   public:
    virtual ~Renewable() = default;
    // Returns this rank's contribution for `generation`, or null if this rank must do other work
    // before it can contribute. `generation` never decreases between calls. The name, kind and
    // dtype of the operation are the same in all generations. The result is valid until the next
    // call.
    virtual const Operation* In(uint32_t generation) = 0;
  };

  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // ---- data

  // Runs an operation and returns the generation in which it ended. If a rank fails during the
  // operation and the launcher's policy is to recover, the other ranks finish the operation. Either
  // all of them use the failed rank's contribution, or none of them does. If none does:
  // - an all-gather has zeros in place of the contribution (GatherLiving reports which ranks
  //   contributed);
  // - a reduce-scatter drops the failed rank's part of the result;
  // - a broadcast from the failed rank throws PeerLostError on every rank, and the communicator
  //   stays usable.
  virtual uint32_t Run(const Operation& operation) = 0;
  // Runs several all-reduces, one after another, so that all of them end in the same generation. A
  // rank that fails during the call contributes either to all of these all-reduces or to none.
  virtual uint32_t RunAll(const Operation* operations, size_t num_operations) = 0;
  // Does the same as RunAll for operations that have already run. An operation runs again if
  // another operation ended in a later generation. The inputs must be the same as in the first run.
  virtual uint32_t Settle(const Operation* operations, uint32_t* generations, size_t num_operations) = 0;
  // Runs an all-reduce whose inputs depend on its generation. The all-reduce starts in
  // `from_generation`, which must be the same on all ranks, and may end in a later generation.
  // Returns none if operation.In() returns null. The other ranks then wait for this rank. When this
  // rank can contribute, it must call RunRenewable again, with the generation that was last passed
  // to In().
  virtual std::optional<uint32_t> RunRenewable(Renewable& operation, uint32_t from_generation) = 0;

  // Sets which ranks have the same data, until the next call. All ranks must pass the same
  // `sources`. A broadcast from one of these ranks may copy the data from any of them. If one of
  // them fails during the broadcast, the broadcast throws PeerLostError on every rank. If `sources`
  // is empty, the data comes only from the root.
  virtual void SetSources(Members sources) { (void)sources; }

  Reductions TakeReductions() { return reductions_.Take(); }
  // Returns the generation in which this rank's last all-reduce ended.
  uint32_t last_generation() const { return reductions_.last_generation(); }

  // ---- members

  uint32_t rank() const { return rank_; }
  uint32_t size() const { return size_; }
  uint64_t cluster_version() const { return cluster_version_; }
  bool is_member() const { return control() != nullptr; }                 // false in a process without a launcher
  bool recovers() const { return is_member() && control()->recovers(); }  // true if the policy is to recover
  // Returns the ranks that contribute to an operation that ends in `generation`.
  Members MembersOf(uint32_t generation) const;
  // Returns all ranks except those that this process knows to have failed.
  Members Living() const { return MembersOf(is_member() ? control()->num_failed() : 0); }
  // Returns the lowest rank that had the training state when it joined, or `size` if no rank had it.
  uint32_t StateRoot() const;

  // ---- control: see ControlBlock. None of these calls is collective.

  void Beat();
  uint64_t announced() const { return is_member() ? control()->announced() : cluster_version_; }
  bool deadlines_held() const { return is_member() && control()->deadlines_held(); }
  uint64_t sync_points() const { return is_member() ? control()->sync_points() : 0; }
  void RequestSyncPoint(uint64_t number);
  // Reports that training has finished step `step`. `each` is the usual duration of a step, or 0 if
  // the duration isn't known yet.
  void NoteStep(uint64_t step, std::chrono::nanoseconds each);
  // Reports what the program is doing, for display (ControlBlock::NoteActivity).
  void NoteActivity(uint32_t activity);
  // Reports whether this rank, between two operations, does long work that involves no other rank.
  // If the rank hangs during this work, the other ranks wait until the launcher detects the hang.
  void SetBusy(bool busy);

  // Checks for a deadlock between the ranks of one host (host/deadlock.h), and closes the
  // communicator if the ranks wait for each other. Call this function repeatedly while threads of
  // this process wait for a long time. `stands_still` is true if no thread of the process makes
  // progress. `place` describes the current position in the program.
  virtual void LookForDeadlock(bool stands_still, const std::string& place) { (void)stands_still, (void)place; }

  // Closes the communicator. Running and later calls throw an error with `status` and `reason`. If
  // the communicator is already closed, Close does nothing.
  virtual void Close(kf_status status, const std::string& reason);
  // Notifies the other ranks that this rank won't contribute to any more operations.
  void Leave();
  // Closes the communicator because this rank can't contribute to an operation that the other ranks
  // wait for. Sends `error` to the other ranks. communicator.cc describes how they react.
  virtual void GiveUp(const Error& error);

 protected:
  Communicator(uint32_t rank, uint32_t size, uint64_t cluster_version);

  // Returns null in a cluster of one rank without a launcher.
  virtual ControlBlock* control() const = 0;

  const uint32_t rank_;
  const uint32_t size_;
  const uint64_t cluster_version_;
  const Members all_ranks_;  // the members in generation 0
  const OneProcess process_;
  Closure closure_;
  ReductionLog reductions_;

 private:
  std::atomic<bool> silent_{false};  // true if this process sends no more heartbeats, because it will be killed
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_COMMUNICATOR_H_
