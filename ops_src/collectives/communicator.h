// The collectives over exactly one cluster version, as everybody else sees them.
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
#include "transport/control_board.h"

namespace kungfu {

struct CommunicatorOptions {
  std::chrono::milliseconds collective_timeout{600000};
  std::chrono::milliseconds join_timeout{300000};
  // After this, and after twice, four times ... as much, a wait says whom it waits for; see base/log.h.
  std::chrono::milliseconds tell_after{10000};
  // Whether GiveUp tells the others. Else it only closes, and whoever made this communicator tells them.
  bool tells{true};
  // Of a member of the segment that stands for others: whom it waits for in this operation, in words.
  std::function<std::string(const Operation&)> behind_it{};
  // A wait that has slept so often (20 ms each) is entered in the watch for deadlocks (host/deadlock.h): none does as a
  // rule where a step goes well, and one that is entered pays for a mutex.
  int watched_after{5};
  // What goes at a time of a large all-reduce over several hosts; the same at all ranks.
  size_t slice_bytes{1 << 20};
};

// Immutable membership: a change makes a new communicator, and this one then answers every call with StaleClusterError.
//
// How data moves is the implementation's: HostCommunicator between the processes of a host (host/host_communicator.h),
// LoneCommunicator in a process that belongs to no cluster. What the members tell each other besides data goes by the
// control board, and is the same for all of them.
//
// A *generation* is the cluster without its first g deaths, in their order: g is the number of ranks that an operation
// was done without.
//
// Thread-safe. Operations under different names run side by side on their callers' threads and don't wait for each
// other; under one name they take turns. Nothing is reordered: the k-th operation under a name meets the k-th of the
// other ranks.
//
// A forked child has a copy that refuses whatever would speak in its parent's name; see base/forks.h.
class Communicator {
 public:
  // An operation that depends on who takes part in it.
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

  // Returns the generation that it ended in. When a rank dies in it (and the launcher's policy is to recover) the
  // others end it with that rank's part or without, all of them alike. Without it, an all-gather has zeros in its place
  // (GatherLiving says whose) and a reduce-scatter drops its part; a broadcast from it throws PeerLostError at every
  // rank, and the communicator can be used on.
  virtual uint32_t Run(const Operation& operation) = 0;
  // All-reduces one after another that end in the same generation: who dies meanwhile has part in all of them or none.
  virtual uint32_t RunAll(const Operation* operations, size_t num_operations) = 0;
  // The same for operations that were run already, with inputs as they were then: those that ended in an earlier
  // generation than the latest are done again.
  virtual uint32_t Settle(const Operation* operations, uint32_t* generations, size_t num_operations) = 0;
  // An all-reduce whose inputs depend on its generation, which is `from_generation` (the same at all ranks) or a later
  // one. Where a rank isn't ready for the one that it has come to, the answer is none, and nobody has lost anything:
  // the others wait for it there, and it calls again when it is, with the generation that it was asked for last.
  virtual std::optional<uint32_t> RunRenewable(Renewable& operation, uint32_t from_generation) = 0;

  // Until the next call, and at all ranks alike: a broadcast whose root is one of these may be taken from any of them,
  // for they bring the same as it does. Where one of them dies in it, it throws PeerLostError at every rank, as where
  // the root does. Empty: from the root alone.
  virtual void SetGivers(Members givers) { (void)givers; }

  Reductions TakeReductions() { return reductions_.Take(); }
  // In which the last all-reduce of this rank ended.
  uint32_t last_generation() const { return reductions_.last_generation(); }

  // ---- members

  uint32_t rank() const { return rank_; }
  uint32_t size() const { return size_; }
  uint64_t cluster_version() const { return cluster_version_; }
  bool is_member() const { return board() != nullptr; }                 // and not a cluster of one that nobody knows of
  bool recovers() const { return is_member() && board()->recovers(); }  // from deaths
  // Who took part in what ended in this generation.
  Members MembersOf(uint32_t generation) const;
  // The ranks that are not known to be dead.
  Members Living() const { return MembersOf(is_member() ? board()->deaths() : 0); }
  // Lowest rank that carried the training state when it joined, `size` if none did.
  uint32_t StateRoot() const;

  // ---- control: see ControlBoard. None of it is collective.

  void Beat();
  uint64_t announced() const { return is_member() ? board()->announced() : cluster_version_; }
  bool deadlines_held() const { return is_member() && board()->deadlines_held(); }
  uint64_t sync_points() const { return is_member() ? board()->sync_points() : 0; }
  void RequestSyncPoint(uint64_t number);
  // The training has ended this step, one of which takes so long (0: not known yet).
  void NoteStep(uint64_t step, std::chrono::nanoseconds each);
  // Between two operations: this rank does something alone. If it dies, the others learn of that as ever; one that
  // hangs is waited for until the launcher finds it.
  void SetBusy(bool busy);

  // Called now and then while this process has slow waits (host/deadlock.h): whether it stands still, and where in the
  // program, in words. Ends the communicator where the ranks wait for each other. Ranks of one host alone look.
  virtual void LookForDeadlock(bool stands_still, const std::string& place) { (void)stands_still, (void)place; }

  // Ends the communicator: callers inside and later ones get `status` with `reason`. Idempotent; the first reason
  // stays.
  virtual void Close(kf_status status, const std::string& reason);
  // Tells the others that this rank won't take part any more.
  void Leave();
  // This rank can't bring an operation that the others count on, because of `error`: closes the communicator and tells
  // them; see communicator.cc for what they do.
  virtual void GiveUp(const Error& error);

 protected:
  Communicator(uint32_t rank, uint32_t size, uint64_t cluster_version);

  // Null in a cluster of one that nobody knows of.
  virtual ControlBoard* board() const = 0;

  const uint32_t rank_;
  const uint32_t size_;
  const uint64_t cluster_version_;
  const Members everyone_;  // of generation 0
  const OneProcess process_;
  Closure closure_;
  ReductionLog reductions_;

 private:
  std::atomic<bool> silent_{false};  // this process is to be ended: its heart beats no more
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_COMMUNICATOR_H_
