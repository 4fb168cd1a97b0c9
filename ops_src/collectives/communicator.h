// The collectives over exactly one cluster version on one host.
#ifndef KUNGFU_COLLECTIVES_COMMUNICATOR_H_
#define KUNGFU_COLLECTIVES_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/forks.h"
#include "collectives/channel_table.h"
#include "collectives/operation.h"
#include "collectives/staging_choice.h"
#include "collectives/transfer.h"
#include "transport/shm/segment.h"

namespace kungfu {

struct CommunicatorOptions {
  std::chrono::milliseconds collective_timeout{600000};
  std::chrono::milliseconds join_timeout{300000};
  // After this, and after twice, four times ... as much, a wait says whom it waits for; see base/log.h.
  std::chrono::milliseconds tell_after{10000};
};

// Immutable membership: a change makes a new communicator, and this one then answers every call with StaleClusterError.
//
// Thread-safe. Operations under different names run side by side on their callers' threads and don't wait for each
// other; under one name they take turns. Nothing is reordered: the k-th operation under a name meets the k-th of the
// other ranks.
//
// A forked child has a copy that refuses whatever would speak in its parent's name; see base/forks.h.
class Communicator {
 public:
  // A cluster of one, which needs no memory shared with anybody.
  explicit Communicator(uint64_t cluster_version = 0);
  // Rank `rank` of `segment`. Announces itself; Assemble() waits for the others. `address` names this rank in messages.
  Communicator(std::shared_ptr<shm::Segment> segment, uint32_t rank, const std::string& address, bool has_state,
               const CommunicatorOptions& options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Waits until every rank that lives has announced itself.
  void Assemble();

  // Returns the generation that it ended in; see communicator.cc. When a rank dies in it (and the launcher's policy is
  // to recover) the others end it with that rank's part or without, all of them alike. Without it, an all-gather has
  // zeros in its place and a reduce-scatter drops its part; a broadcast from it throws PeerLostError at every rank, and
  // the communicator can be used on.
  uint32_t Run(const Operation& operation);
  // All-reduces one after another that end in the same generation: who dies meanwhile has part in all of them or none.
  uint32_t RunAll(const Operation* operations, size_t num_operations);
  // The same for operations that were run already, with inputs as they were then: those that ended in an earlier
  // generation than the latest are done again.
  uint32_t Settle(const Operation* operations, uint32_t* generations, size_t num_operations);

  // Who took part in the gradient reductions (operations that are `weighted`; where there was none, in all-reduces)
  // since the last call: the same answer at all who took part. Everybody where there was none.
  Members TakeParticipants();
  // What came of the reductions since the last call, in generations plus one; 0: there was none. Operations of one mind
  // are one commit. A step may have several (two optimizers, one after the other), and a rank may die between them,
  // when the first update is done: `first` is less than `last` then. The same answer at all who took part in the last.
  struct Reductions {
    uint32_t gradient, any;         // the latest of the gradients', and of all all-reduces
    uint32_t commits, first, last;  // of gradients
  };
  Reductions TakeReductions();
  // Who took part in what ended in this generation.
  Members MembersOf(uint32_t generation) const;
  // The ranks that are not known to be dead.
  Members Living() const;
  void Beat();  // "this process runs"

  uint32_t rank() const { return rank_; }
  uint32_t size() const { return size_; }
  uint64_t cluster_version() const { return cluster_version_; }
  bool recovers() const { return segment_ != nullptr && segment_->header().recovers != 0; }  // from deaths
  bool is_member() const { return segment_ != nullptr; }  // and not a cluster of one that nobody knows of
  // In which the last all-reduce of this rank ended: the number of deaths that it was done without.
  uint32_t last_generation() const { return last_generation_.load(std::memory_order_relaxed); }
  // Newest cluster version that the launcher has announced.
  uint64_t announced() const;
  // How many meetings the members have asked for in this cluster version, and asking for the one with this number, from
  // 1. Not collective, and the same as soon as it is seen: an atomic word that only grows.
  uint64_t meetings() const;
  void CallMeeting(uint64_t number);
  // Between two operations: this rank does something alone that may take longer than the others' deadlines, which count
  // from its end then. Only the rank itself writes the word, and nobody decides anything else by it: if it dies, the
  // others learn of that as ever. One that hangs is waited for until the launcher finds it.
  void SetBusy(bool busy);
  // Lowest rank that carried the training state when it joined, `size` if none did.
  uint32_t StateRoot() const;

  // Ends the communicator: callers inside and later ones get `status` with `reason`. Idempotent; the first reason
  // stays.
  void Close(kf_status status, const std::string& reason);
  // Tells the others that this rank won't take part any more.
  void Leave();
  // This rank can't bring an operation that the others count on, because of `error`: closes the communicator and tells
  // them; see communicator.cc for what they do.
  void GiveUp(const Error& error);

 private:
  struct Flight;  // an operation under way
  class KeptInputs;
  class Patience;  // of one wait

  void Validate(const Operation& operation) const;
  void RunAlone(const Operation& operation) const;
  template <typename Body>
  void OrGiveUp(const Body& body);
  void AwaitMembers();
  bool CloseFirst(kf_status status, const std::string& reason);
  uint32_t RunShared(const Operation& operation, uint32_t from_generation);
  uint32_t SettleShared(const Operation* operations, uint32_t* generations, size_t num_operations);
  void NoteGeneration(const Operation& operation, uint32_t generation);
  void NoteCommit(const Operation& operation, uint32_t generation);
  bool IsDead(uint32_t rank) const;
  bool HasFinished(uint32_t rank, const Flight& flight) const;
  void CheckDeaths(const Flight& flight) const;
  void Publish(shm::Counter& word, uint32_t next) const;
  [[noreturn]] void ThrowExpelled() const;
  void CountTraffic(const Flight& flight, uint64_t began) const;
  void RunOnce(Flight& flight);
  void RunChunks(Flight& flight);
  void RunPipelined(Flight& flight, StagingTurns& turns);
  void RunSplit(Flight& flight, StagingTurns& turns);
  shm::Post& PreparePost(const Flight& flight);
  void AwaitRoom(Flight& flight, uint32_t chunk);
  void StageChunk(Flight& flight, StagingTurns& turns, uint32_t chunk, Cursor& input);
  void AwaitPosts(Flight& flight);
  [[noreturn]] void ReportMismatch(Flight& flight);

  void BindLane(Flight& flight);
  uint32_t PickLane(Flight& flight);
  uint64_t TakeLane();
  void GiveLaneBack(uint64_t bit);
  void StirLaneWaiters();
  void LeaveLane(const Flight& flight, bool failed);

  // Waits until `counter` of `peer` has reached `target`; with `or_dead`, or `peer` is dead.
  void Await(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight, bool or_dead = false);
  void AwaitSlowly(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight, bool or_dead);
  bool IsInTheWay(int core, const Flight& flight) const;
  // Throws if going on with `flight`, or waiting for `peer` in it, has become pointless.
  void LookAround(const Flight& flight) const;
  void LookAround(const shm::Counter& counter, uint32_t target, uint32_t peer, const Flight& flight) const;
  void LookAroundForTable(const Operation& operation, std::chrono::steady_clock::time_point since) const;
  void ThrowIfClosed() const;
  void ThrowIfLost(const std::string& who) const;
  void ThrowIfGivenUp() const;
  bool SomebodyIsBusy(const Flight& flight) const;
  std::string Awaited(uint32_t peer, const Flight& flight) const;
  std::string PeerName(uint32_t rank) const;

  const std::shared_ptr<shm::Segment> segment_;  // null in a cluster of one
  const uint32_t rank_;
  const uint32_t size_;
  const uint64_t cluster_version_;
  const CommunicatorOptions options_;
  const bool oversubscribed_;  // more ranks than cores
  const uint32_t ahead_;       // chunks staged beyond the one that is being read
  Members everyone_;           // of generation 0
  std::unique_ptr<ChannelTable> channels_;
  StagingChoice staging_choice_;
  // Latest generation of a gradient reduction, and of any all-reduce, since TakeParticipants; plus one, 0: none.
  std::atomic<uint32_t> gradient_generation_{0};
  std::atomic<uint32_t> reduce_generation_{0};
  std::atomic<uint32_t> last_generation_{0};
  std::atomic<uint32_t> commits_{0};
  // Of the first and the last operations that were of one mind, likewise.
  std::atomic<uint32_t> first_commit_{0};
  std::atomic<uint32_t> last_commit_{0};

  const OneProcess process_;
  std::atomic<bool> gave_up_alone_{false};  // this process is to be ended: its heart beats no more
  std::atomic<bool> closed_{false};
  mutable std::mutex close_mutex_;
  kf_status close_status_ = KF_OK;  // guarded by close_mutex_
  std::string close_reason_;        // guarded by close_mutex_
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_COMMUNICATOR_H_
