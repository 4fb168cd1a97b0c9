// The collectives over exactly one cluster version: the interface for all other layers.
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
  // After this, and after twice, four times ... as much, a wait logs which rank it waits for; see base/log.h.
  std::chrono::milliseconds tell_after{10000};
  // Whether GiveUp notifies the others. If not, it only closes, and the owner of this communicator notifies them.
  bool tells{true};
  // Of a member of the segment that stands for others: what it waits for in this operation, in words.
  std::function<std::string(const Operation&)> behind_it{};
  // A wait that has slept so often (20 ms each) is entered in the watch for deadlocks (host/deadlock.h): none does as a
  // rule if a step goes well, and one that is entered pays for a mutex.
  int watched_after{5};
  // What goes at a time of a large all-reduce over several hosts; the same at all ranks.
  size_t slice_bytes{1 << 20};
};

// Immutable membership: a change makes a new communicator, and this one then answers every call with StaleClusterError.
//
// How data moves is the implementation's: HostCommunicator between the processes of a host (host/host_communicator.h),
// LoneCommunicator in a process that belongs to no cluster. What the members tell each other besides data goes by the
// control block, and is the same for all of them.
//
// A *generation* is the cluster without its first g failures, in their order: g is the number of ranks that an
// operation was done without.
//
// Thread-safe. Operations under different names run side by side on their callers' threads and don't wait for each
// other; under one name they take turns. Nothing is reordered: the k-th operation under a name meets the k-th of the
// other ranks.
//
// A forked child has a copy that refuses whatever would speak in its parent's name; see base/forks.h.
class Communicator {
 public:
  // An operation that depends on which ranks contribute.
  class Renewable {
   public:
    virtual ~Renewable() = default;
    // As this rank brings it in `generation`, which never falls from one call to the next; null: it has something to do
    // before it can. Of one name, kind and dtype in all generations; valid until the next call.
    virtual const Operation* In(uint32_t generation) = 0;
  };

  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // ---- data

  // Returns the generation that it ended in. If a rank fails in it and the launcher's policy is to recover, the others
  // end it with that rank's contribution or without it, all of them alike. Without it, an all-gather has zeros in its
  // place (GatherLiving says which) and a reduce-scatter drops its part. A broadcast from it throws PeerLostError at
  // every rank, and the communicator stays usable.
  virtual uint32_t Run(const Operation& operation) = 0;
  // All-reduces one after another that end in the same generation: a rank that fails meanwhile contributes to all of
  // them or to none.
  virtual uint32_t RunAll(const Operation* operations, size_t num_operations) = 0;
  // The same for operations that were run already, with inputs as they were then: those that ended in an earlier
  // generation than the latest are done again.
  virtual uint32_t Settle(const Operation* operations, uint32_t* generations, size_t num_operations) = 0;
  // An all-reduce whose inputs depend on its generation, which is `from_generation` (the same at all ranks) or a later
  // one. If a rank isn't ready for the one that it has come to, the answer is none, and no data is lost: the others
  // wait for it there, and it calls again when it is, with the generation that it was asked for last.
  virtual std::optional<uint32_t> RunRenewable(Renewable& operation, uint32_t from_generation) = 0;

  // Until the next call, and at all ranks alike: a broadcast whose root is one of these may be taken from any of them,
  // because they have the same data. If one of them fails in it, it throws PeerLostError at every rank, as if the root
  // fails. Empty: from the root alone.
  virtual void SetSources(Members sources) { (void)sources; }

  Reductions TakeReductions() { return reductions_.Take(); }
  // In which the last all-reduce of this rank ended.
  uint32_t last_generation() const { return reductions_.last_generation(); }

  // ---- members

  uint32_t rank() const { return rank_; }
  uint32_t size() const { return size_; }
  uint64_t cluster_version() const { return cluster_version_; }
  bool is_member() const { return control() != nullptr; }  // and not a cluster of one that no launcher knows
  bool recovers() const { return is_member() && control()->recovers(); }  // from failures
  // The ranks that contributed to what ended in this generation.
  Members MembersOf(uint32_t generation) const;
  // The ranks that aren't known to have failed.
  Members Living() const { return MembersOf(is_member() ? control()->num_failed() : 0); }
  // Lowest rank that carried the training state when it joined, `size` if none did.
  uint32_t StateRoot() const;

  // ---- control: see ControlBlock. None of it is collective.

  void Beat();
  uint64_t announced() const { return is_member() ? control()->announced() : cluster_version_; }
  bool deadlines_held() const { return is_member() && control()->deadlines_held(); }
  uint64_t sync_points() const { return is_member() ? control()->sync_points() : 0; }
  void RequestSyncPoint(uint64_t number);
  // The training has ended this step, one of which takes so long (0: not known yet).
  void NoteStep(uint64_t step, std::chrono::nanoseconds each);
  // Between two operations: this rank does something alone. If it fails, the others learn so as usual; one that hangs
  // is awaited until the launcher finds it.
  void SetBusy(bool busy);

  // Called now and then while this process has slow waits (host/deadlock.h): whether it stands still, and where in the
  // program, in words. Ends the communicator if the ranks wait for each other. Ranks of one host alone look.
  virtual void LookForDeadlock(bool stands_still, const std::string& place) { (void)stands_still, (void)place; }

  // Ends the communicator: callers inside and later ones get `status` with `reason`. Idempotent; the first reason
  // stays.
  virtual void Close(kf_status status, const std::string& reason);
  // Notifies the others that this rank won't contribute any more.
  void Leave();
  // This rank can't bring an operation that the others count on, because of `error`: closes the communicator and tells
  // them; see communicator.cc for what they do.
  virtual void GiveUp(const Error& error);

 protected:
  Communicator(uint32_t rank, uint32_t size, uint64_t cluster_version);

  // Null in a cluster of one that no launcher knows.
  virtual ControlBlock* control() const = 0;

  const uint32_t rank_;
  const uint32_t size_;
  const uint64_t cluster_version_;
  const Members all_ranks_;  // of generation 0
  const OneProcess process_;
  Closure closure_;
  ReductionLog reductions_;

 private:
  std::atomic<bool> silent_{false};  // this process is to be ended: its heart beats no more
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_COMMUNICATOR_H_
