// The shared words through which the members of a cluster version and their launcher notify each
// other. The words show which ranks are present, which have failed and in which order, which have
// called GiveUp, and which version comes next. They contain no tensor data and change rarely, so
// they don't slow down operations. This interface doesn't define where the words are stored. On one
// host they are in the segment (transport/shm/segment_control_block.h).
#ifndef KUNGFU_TRANSPORT_CONTROL_BLOCK_H_
#define KUNGFU_TRANSPORT_CONTROL_BLOCK_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace kungfu {

// The state of a rank. It changes only to higher values, and kLost is final.
enum class RankState : uint32_t { kAbsent = 0, kAttached = 1, kLeft = 2, kLost = 3 };

// What happens if a rank can't continue. With kAlone, only this rank is affected, and the other
// ranks wait until the launcher has ended this rank's process. With kForAll, the communicator is
// closed on every rank.
enum class GaveUp : uint32_t { kNo = 0, kAlone = 1, kForAll = 2 };

// The functions are grouped by the process that writes the words. Each word has only one writer.
// `rank` must always be below size().
class ControlBlock {
 public:
  virtual ~ControlBlock() = default;

  // ---- fixed when the cluster version is created
  virtual uint32_t size() const = 0;
  virtual uint64_t cluster_version() const = 0;
  virtual bool recovers() const = 0;  // true if the members continue without failed ranks

  // ---- written by the launcher, from one thread at a time
  virtual void Announce(uint64_t version) = 0;
  virtual uint64_t announced() const = 0;  // the newest cluster version that the launcher knows
  // While deadlines are held, no member's deadline runs. The launcher holds them while it waits for
  // the job's store, because it can't publish decisions without the store.
  virtual void HoldDeadlines(bool held) = 0;
  virtual bool deadlines_held() const = 0;
  // Marks `rank` as lost. `reason` is for the survivors. With `recover`, the rank is added to the
  // list of failures, and the survivors continue without it. Without `recover`, all waiting ranks
  // fail. Only the first call counts. Later calls change only `reaped`.
  //
  // The rank's process may still exist, for example because it hangs in the kernel or in a frozen
  // cgroup. No rank sees what the process publishes after this call. `reaped` means that none of
  // its threads run any more, so its channels are free for other ranks.
  virtual void MarkLost(uint32_t rank, const std::string& reason, bool recover, bool reaped = false) = 0;
  virtual std::string LostReason(uint32_t rank) const = 0;  // valid only for a rank that is marked as lost
  // The list of failures grows only at its end, so all readers have the same first n entries.
  virtual uint32_t num_failed() const = 0;
  virtual uint32_t FailedRank(uint32_t index) const = 0;

  // ---- written by the rank itself
  // Takes slot `rank` for this process. Returns false if the slot is already taken.
  virtual bool Attach(uint32_t rank, const std::string& address, bool has_state) = 0;
  virtual std::string Address(uint32_t rank) const = 0;
  virtual bool HasState(uint32_t rank) const = 0;  // whether the rank had the training state when it joined
  virtual void Leave(uint32_t rank) = 0;
  virtual RankState State(uint32_t rank) const = 0;
  virtual void Beat(uint32_t rank) = 0;                 // records that this process is running
  virtual uint32_t Heartbeat(uint32_t rank) const = 0;  // 0 before the rank has joined and after it has left
  // Records that the rank's training has finished step `step`. `each` is the usual duration of a
  // step, or 0 if it isn't known yet.
  virtual void NoteStep(uint32_t rank, uint64_t step, std::chrono::nanoseconds each) = 0;
  // Records what the rank's program is doing, for display. `activity` is a number that the launcher
  // knows, or 0 for no particular activity.
  virtual void NoteActivity(uint32_t rank, uint32_t activity) = 0;
  // Sets whether the rank does long work that involves no other rank. The other ranks' deadlines
  // begin only at the end of this work.
  virtual void SetBusy(uint32_t rank, bool busy) = 0;
  virtual bool IsBusy(uint32_t rank) const = 0;
  // Call this function only once. A call after the rank was fenced has no effect.
  virtual void GiveUp(uint32_t rank, GaveUp how, kf_status status, const std::string& text) = 0;
  // If the rank has called GiveUp with kAlone and must be ended, returns that call's `text`.
  // Otherwise returns an empty string.
  virtual std::string GaveUpAlone(uint32_t rank) const = 0;

  // ---- written by any member
  // Requests the sync point with this number (1 or more). sync_points() returns the number of
  // requested sync points, which never decreases. A rank that has reached fewer sync points than
  // requested goes to the next one.
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
