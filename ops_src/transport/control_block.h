// The words by which the members of a cluster version and their launcher notify each other: which ranks are present,
// which have failed and in which order, which have given up, and which version comes next. They carry no tensor data
// and change rarely, so they don't slow down operations. This interface doesn't define where the words are stored. On
// one host they are in the segment (transport/shm/segment_control_block.h).
#ifndef KUNGFU_TRANSPORT_CONTROL_BLOCK_H_
#define KUNGFU_TRANSPORT_CONTROL_BLOCK_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace kungfu {

// The state of a rank. It only changes to higher values, and kLost is final.
enum class RankState : uint32_t { kAbsent = 0, kAttached = 1, kLeft = 2, kLost = 3 };

// How a rank gives up if it can't continue. kAlone: only this rank is affected, and the other ranks wait until the
// launcher has ended it. kForAll: the communicator is closed at every rank.
enum class GaveUp : uint32_t { kNo = 0, kAlone = 1, kForAll = 2 };

// The functions are grouped by the writer of the words; each word has one writer. `rank` must always be below size().
class ControlBlock {
 public:
  virtual ~ControlBlock() = default;

  // // ---- fixed when the version is created
  virtual uint32_t size() const = 0;
  virtual uint64_t cluster_version() const = 0;
  virtual bool recovers() const = 0;  // the members continue without failed ranks

  // ---- written by the launcher, from one thread at a time
  virtual void Announce(uint64_t version) = 0;
  virtual uint64_t announced() const = 0;  // newest cluster version that the launcher knows of
  // While held, no deadline of a member runs. The launcher holds them while it waits for the job's store. Until the
  // store replies, the launcher can't publish what the members wait for (the choice of a version, the loss of a host).
  virtual void HoldDeadlines(bool held) = 0;
  virtual bool deadlines_held() const = 0;
  // Marks `rank` as lost, with the reason for the survivors. With `recover`, the rank is entered in the list of
  // failures, and the survivors continue without it. Otherwise all waiting ranks fail. The first call counts; later
  // calls change only `reaped`.
  //
  // The process may still live (it hangs in the kernel or in a frozen cgroup). No rank sees what it publishes after
  // this call. `reaped` means that none of its threads run any more, so its channels are free for other ranks.
  virtual void MarkLost(uint32_t rank, const std::string& reason, bool recover, bool reaped = false) = 0;
  virtual std::string LostReason(uint32_t rank) const = 0;  // only for a rank that is marked as lost
  // The list of failures only grows at its end, so all readers have the same first n entries.
  virtual uint32_t num_failed() const = 0;
  virtual uint32_t FailedRank(uint32_t index) const = 0;

  // ---- written by the rank itself
  // Takes slot `rank` for this process. Returns false if the slot is already taken.
  virtual bool Attach(uint32_t rank, const std::string& address, bool has_state) = 0;
  virtual std::string Address(uint32_t rank) const = 0;
  virtual bool HasState(uint32_t rank) const = 0;  // whether the rank had the training state when it joined
  virtual void Leave(uint32_t rank) = 0;
  virtual RankState State(uint32_t rank) const = 0;
  virtual void Beat(uint32_t rank) = 0;                 // notes that this process runs
  virtual uint32_t Heartbeat(uint32_t rank) const = 0;  // 0 before the rank has joined and after it has left
  // Records that the rank's training has finished step `step`. `each` is the usual duration of a step; 0 if not known
  // yet.
  virtual void NoteStep(uint32_t rank, uint64_t step, std::chrono::nanoseconds each) = 0;
  // Records what the rank's program does, for display: a number that the launcher knows; 0 for no particular activity.
  virtual void NoteActivity(uint32_t rank, uint32_t activity) = 0;
  // Sets whether the rank does long work alone. The other ranks' deadlines count only from the end of this work.
  virtual void SetBusy(uint32_t rank, bool busy) = 0;
  virtual bool IsBusy(uint32_t rank) const = 0;
  // Called once. If the rank was fenced before, no rank sees the call, and none needs to.
  virtual void GiveUp(uint32_t rank, GaveUp how, kf_status status, const std::string& text) = 0;
  // Returns the message of a rank that has given up alone and must be ended. Empty for other ranks.
  virtual std::string GaveUpAlone(uint32_t rank) const = 0;

  // ---- written by any member
  // Requests the sync point with this number (1 or more). sync_points() returns the number of requested sync points,
  // which never decreases. A rank that has reached fewer sync points goes to the next one.
  virtual void RequestSyncPoint(uint64_t number) = 0;
  virtual uint64_t sync_points() const = 0;

  // Returns the rank's name for messages: "rank 2 (127.0.0.1:10002)".
  virtual std::string PeerName(uint32_t rank) const {
    const std::string address = Address(rank);
    return address.empty() ? Text("rank ", rank) : Text("rank ", rank, " (", address, ")");
  }
};

}  // namespace kungfu

#endif  // KUNGFU_TRANSPORT_CONTROL_BLOCK_H_
