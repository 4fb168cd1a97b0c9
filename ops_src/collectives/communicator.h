// The collectives of one cluster version: the interface that all other layers use.
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
  // A wait logs the rank that it waits for after this time, and again after twice this time, four times, and so on. See
  // base/log.h.
  std::chrono::milliseconds tell_after{10000};
  // Whether GiveUp notifies the other ranks. If false, GiveUp only closes this communicator, and its owner notifies the
  // other ranks.
  bool tells{true};
  // Describes what a proxy member waits for in an operation. A host's transport is a proxy member: in the host's
  // segment it represents all other hosts. Empty if the segment has no proxy member.
  std::function<std::string(const Operation&)> behind_it{};
  // After this number of sleeps (20 ms each), a wait is registered for the detection of deadlocks (host/deadlock.h).
  // Registering takes a mutex. Most waits of a healthy step end earlier and don't pay for the mutex.
  int watched_after{5};
  // Bytes of one slice of a large all-reduce over several hosts. Must be equal at all ranks.
  size_t slice_bytes{1 << 20};
};

// The members of a communicator never change. A membership change creates a new communicator, and every call on the old
// communicator then throws StaleClusterError.
//
// Subclasses implement the data transfer. HostCommunicator works between the processes of one host
// (host/host_communicator.h), and ClusterCommunicator between hosts (hosts/cluster_communicator.h). LoneCommunicator
// works in a process that belongs to no cluster. Everything besides data goes through the control block, which all
// subclasses use in the same way.
//
// *Generation* g is the cluster without its first g failed ranks, in the order of the failures. So if an operation
// ended in generation g, it ran without g ranks.
//
// Thread-safe. Operations with different names run concurrently on their callers' threads and don't wait for each
// other. Operations with the same name run one after another. Their order is fixed: the k-th operation with a name at
// one rank matches the k-th operation with that name at every other rank.
//
// After a fork, the child's copy of a communicator refuses every call that would act on behalf of the parent process.
// See base/forks.h.
class Communicator {
 public:
  // An operation whose inputs depend on which ranks contribute.
  class Renewable {
   public:
    virtual ~Renewable() = default;
    // Returns this rank's contribution for `generation`, or null if this rank must do other work before it can
    // contribute. `generation` never decreases from one call to the next. The name, kind and dtype are the same in all
    // generations. The result is valid until the next call.
    virtual const Operation* In(uint32_t generation) = 0;
  };

  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // ---- data

  // Runs an operation and returns the generation in which it ended. If a rank fails during the operation and the
  // launcher's policy is to recover, the other ranks finish the operation. Either all of them use the failed rank's
  // contribution, or none does. If they don't use the contribution:
  // - an all-gather has zeros in its place (GatherLiving reports which ranks contributed);
  // - a reduce-scatter drops the failed rank's part of the result;
  // - a broadcast from the failed rank throws PeerLostError at every rank, and the communicator stays usable.
  virtual uint32_t Run(const Operation& operation) = 0;
  // Runs several all-reduces, one after another, that all end in the same generation. A rank that fails during the call
  // contributes to all of them or to none.
  virtual uint32_t RunAll(const Operation* operations, size_t num_operations) = 0;
  // Like RunAll, but for operations that have run already. Operations that ended in an earlier generation than the
  // latest run again. Their inputs must be the same as in the first run.
  virtual uint32_t Settle(const Operation* operations, uint32_t* generations, size_t num_operations) = 0;
  // Runs an all-reduce whose inputs depend on its generation. It starts in `from_generation`, which must be equal at
  // all ranks, and may end in a later generation. Returns none if this rank isn't ready to contribute in the
  // generation that the operation has reached. In that case no data is lost: the other ranks wait in that generation.
  // When this rank is ready, it calls again with the generation of the last call of In().
  virtual std::optional<uint32_t> RunRenewable(Renewable& operation, uint32_t from_generation) = 0;

  // Sets the ranks that have the same data; the setting holds until the next call. A broadcast whose root is among
  // `sources` may copy the data from any of them. All ranks must set the same `sources`. If one of the sources fails
  // during the broadcast, the broadcast throws PeerLostError at every rank, as it does if the root fails. If `sources`
  // is empty, the data comes from the root only.
  virtual void SetSources(Members sources) { (void)sources; }

  Reductions TakeReductions() { return reductions_.Take(); }
  // Returns the generation in which this rank's last all-reduce ended.
  uint32_t last_generation() const { return reductions_.last_generation(); }

  // ---- members

  uint32_t rank() const { return rank_; }
  uint32_t size() const { return size_; }
  uint64_t cluster_version() const { return cluster_version_; }
  bool is_member() const { return control() != nullptr; }                 // false without a launcher
  bool recovers() const { return is_member() && control()->recovers(); }  // whether the policy is to recover
  // Returns the ranks that contributed to operations that ended in `generation`.
  Members MembersOf(uint32_t generation) const;
  // Returns the ranks that aren't known to have failed.
  Members Living() const { return MembersOf(is_member() ? control()->num_failed() : 0); }
  // Returns the lowest rank that had the training state when it joined, or `size` if no rank had it.
  uint32_t StateRoot() const;

  // ---- control: see ControlBlock. None of these calls is collective.

  void Beat();
  uint64_t announced() const { return is_member() ? control()->announced() : cluster_version_; }
  bool deadlines_held() const { return is_member() && control()->deadlines_held(); }
  uint64_t sync_points() const { return is_member() ? control()->sync_points() : 0; }
  void RequestSyncPoint(uint64_t number);
  // Reports that training has finished step `step`. `each` is the usual duration of a step; 0 means that it isn't known
  // yet.
  void NoteStep(uint64_t step, std::chrono::nanoseconds each);
  // Reports what the program does, for display (ControlBlock::NoteActivity).
  void NoteActivity(uint32_t activity);
  // Reports whether this rank does long work alone, between two operations. If the rank fails during this work, the
  // other ranks are notified as usual. If the rank hangs, the other ranks wait until the launcher detects the hang.
  void SetBusy(bool busy);

  // Checks for a deadlock between the ranks of one host (host/deadlock.h), and closes the communicator if the ranks
  // wait for each other. Call it repeatedly while threads of this process wait for a long time. `stands_still`:
  // whether no thread of the process makes progress. `place` describes where the program is.
  virtual void LookForDeadlock(bool stands_still, const std::string& place) { (void)stands_still, (void)place; }

  // Closes the communicator: current and later calls throw an error with `status` and `reason`. If it is closed
  // already, the call does nothing.
  virtual void Close(kf_status status, const std::string& reason);
  // Notifies the other ranks that this rank won't contribute any more.
  void Leave();
  // Closes the communicator because this rank can't contribute to an operation that the other ranks wait for, and sends
  // them `error`. communicator.cc describes how the other ranks react.
  virtual void GiveUp(const Error& error);

 protected:
  Communicator(uint32_t rank, uint32_t size, uint64_t cluster_version);

  // Returns null in a cluster of one without a launcher.
  virtual ControlBlock* control() const = 0;

  const uint32_t rank_;
  const uint32_t size_;
  const uint64_t cluster_version_;
  const Members all_ranks_;  // the members in generation 0
  const OneProcess process_;
  Closure closure_;
  ReductionLog reductions_;

 private:
  std::atomic<bool> silent_{false};  // this process will be killed, so it sends no more heartbeats
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_COMMUNICATOR_H_
