// What the members of one cluster version, and their launcher, announce to each other besides data: which ranks are
// there, which have failed and in which order, which have given up, which version comes next. These words are rare, and
// none is on the path of an operation's bytes. This interface doesn't fix how they travel: on one host they lie in the
// segment (transport/shm/segment_control_block.h).
#ifndef KUNGFU_TRANSPORT_CONTROL_BLOCK_H_
#define KUNGFU_TRANSPORT_CONTROL_BLOCK_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace kungfu {

// It only grows, and stays at kLost.
enum class RankState : uint32_t { kAbsent = 0, kAttached = 1, kLeft = 2, kLost = 3 };

// Of a rank that can't go on. kAlone: it is out by itself, and the others wait until the launcher has ended it.
// kForAll: the communicator is finished at every rank.
enum class GaveUp : uint32_t { kNo = 0, kAlone = 1, kForAll = 2 };

// Each word has one writer, by which it is grouped here. A rank is below size() everywhere.
class ControlBlock {
 public:
  virtual ~ControlBlock() = default;

  // ---- fixed when the version is made
  virtual uint32_t size() const = 0;
  virtual uint64_t cluster_version() const = 0;
  virtual bool recovers() const = 0;  // the members go on without failed ranks

  // ---- written by the launcher, from one thread at a time
  virtual void Announce(uint64_t version) = 0;
  virtual uint64_t announced() const = 0;  // newest cluster version that the launcher knows of
  // While it is held no deadline of a member runs: the launcher waits for the job's store, and can't say yet what the
  // members wait for (a version's choice, the loss of a host).
  virtual void HoldDeadlines(bool held) = 0;
  virtual bool deadlines_held() const = 0;
  // Marks `rank` as lost, with the reason for the survivors. With `recover` they go on without it (it is entered in the
  // list of failures), otherwise all waiting ranks fail. Idempotent; the first call counts. The process may still live
  // (it hangs in the kernel, in a frozen cgroup): no rank sees what it publishes from now on. With `reaped` no thread
  // of it runs any more, and what it has bound is free for others. A later call may add that.
  virtual void MarkLost(uint32_t rank, const std::string& reason, bool recover, bool reaped = false) = 0;
  virtual std::string LostReason(uint32_t rank) const = 0;  // of one that is marked
  // The list of failures only grows at its end, so its first n are the same at every reader.
  virtual uint32_t num_failed() const = 0;
  virtual uint32_t FailedRank(uint32_t index) const = 0;

  // ---- written by the rank itself
  // Takes the place of `rank`. False: it has been taken before.
  virtual bool Attach(uint32_t rank, const std::string& address, bool has_state) = 0;
  virtual std::string Address(uint32_t rank) const = 0;
  virtual bool HasState(uint32_t rank) const = 0;  // it carried the training state when it came
  virtual void Leave(uint32_t rank) = 0;
  virtual RankState State(uint32_t rank) const = 0;
  virtual void Beat(uint32_t rank) = 0;                 // "this process runs"
  virtual uint32_t Heartbeat(uint32_t rank) const = 0;  // 0 before it has joined and after it left
  // Its training has ended this step; such a step takes so long, 0: that isn't known yet.
  virtual void NoteStep(uint32_t rank, uint64_t step, std::chrono::nanoseconds each) = 0;
  // It does something alone that may take longer than the others' deadlines, which count from its end then.
  virtual void SetBusy(uint32_t rank, bool busy) = 0;
  virtual bool IsBusy(uint32_t rank) const = 0;
  // Once. What is not seen because the rank has been fenced first needn't be.
  virtual void GiveUp(uint32_t rank, GaveUp how, kf_status status, const std::string& text) = 0;
  // The text of one that is out alone, and is to be ended; empty for others.
  virtual std::string GaveUpAlone(uint32_t rank) const = 0;

  // ---- written by any member
  // How many sync points members have asked for, and asking for the one with this number, from 1. It never decreases: a
  // rank that has been at fewer goes to the next one.
  virtual void RequestSyncPoint(uint64_t number) = 0;
  virtual uint64_t sync_points() const = 0;

  // "rank 2 (127.0.0.1:10002)", for messages.
  virtual std::string PeerName(uint32_t rank) const {
    const std::string address = Address(rank);
    return address.empty() ? Text("rank ", rank) : Text("rank ", rank, " (", address, ")");
  }
};

}  // namespace kungfu

#endif  // KUNGFU_TRANSPORT_CONTROL_BLOCK_H_
