// The control block for the ranks of one host. Its words are in the ranks' segment.
#ifndef KUNGFU_TRANSPORT_SHM_SEGMENT_CONTROL_BLOCK_H_
#define KUNGFU_TRANSPORT_SHM_SEGMENT_CONTROL_BLOCK_H_

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/control_block.h"
#include "transport/shm/segment.h"

namespace kungfu::shm {

// Thread-safe. Any process that has the segment can use this class. The functions that operations
// call are inline, and their calls aren't virtual if the caller uses this class directly.
class SegmentControlBlock final : public ControlBlock {
 public:
  // If the segment contains only a part of the cluster, `numbers` contains the cluster ranks of the
  // segment's ranks, for messages. The segment's last rank stands for the other hosts and has no
  // number.
  explicit SegmentControlBlock(std::shared_ptr<Segment> segment, std::vector<uint32_t> numbers = {})
      : segment_(std::move(segment)), numbers_(std::move(numbers)) {}

  uint32_t size() const override { return segment_->size(); }
  uint64_t cluster_version() const override { return segment_->cluster_version(); }
  bool recovers() const override { return header().recovers != 0; }

  void Announce(uint64_t version) override { header().announced.store(version); }
  uint64_t announced() const override { return header().announced.load(std::memory_order_acquire); }
  void HoldDeadlines(bool held) override { header().deadlines_held.store(held ? 1 : 0, std::memory_order_release); }
  bool deadlines_held() const override { return header().deadlines_held.load(std::memory_order_acquire) != 0; }
  void MarkLost(uint32_t rank, const std::string& reason, bool recover, bool reaped = false) override;
  std::string LostReason(uint32_t rank) const override { return segment_->status(rank).lost_reason; }
  uint32_t num_failed() const override { return header().num_failed.load(std::memory_order_acquire); }
  uint32_t FailedRank(uint32_t index) const override { return header().failure_order[index]; }

  bool Attach(uint32_t rank, const std::string& address, bool has_state) override;
  std::string Address(uint32_t rank) const override;
  bool HasState(uint32_t rank) const override { return segment_->status(rank).has_state != 0; }
  void Leave(uint32_t rank) override;
  RankState State(uint32_t rank) const override;
  void Beat(uint32_t rank) override { segment_->status(rank).heartbeat.fetch_add(1, std::memory_order_relaxed); }
  uint32_t Heartbeat(uint32_t rank) const override;
  void NoteStep(uint32_t rank, uint64_t step, std::chrono::nanoseconds each) override;
  void NoteActivity(uint32_t rank, uint32_t activity) override;
  void SetBusy(uint32_t rank, bool busy) override {
    segment_->status(rank).busy.store(busy ? 1 : 0, std::memory_order_release);
  }
  bool IsBusy(uint32_t rank) const override { return segment_->status(rank).busy.load(std::memory_order_acquire) != 0; }
  void GiveUp(uint32_t rank, GaveUp how, kf_status status, const std::string& text) override;
  std::string GaveUpAlone(uint32_t rank) const override;

  void RequestSyncPoint(uint64_t number) override;
  uint64_t sync_points() const override { return header().sync_points.load(std::memory_order_acquire); }

  // The training progress that a rank has reported: the last finished step, the duration of a step,
  // and the time since the report. The three words aren't read atomically, so one may be newer than
  // the others. The progress is valid only on the rank's host, and empty if the rank has reported
  // nothing.
  struct Progress {
    uint64_t step;
    std::chrono::nanoseconds each, ago;
  };
  std::optional<Progress> ProgressOf(uint32_t rank) const;
  // What a rank is doing, for display: its last activity, the time since this activity began, and
  // the operations in which the rank's process has been idle for a long time (WaitReport). Valid
  // only on the rank's host. The words aren't read atomically.
  struct Activity {
    uint32_t activity;
    std::chrono::nanoseconds ago;
    std::string operations;
  };
  Activity ActivityOf(uint32_t rank) const;

  // ---- the rank that another rank waits for. These words are hints for the launcher, which checks
  // twice before it acts.

  // Records that `rank` sleeps in a wait for `peer`. If `peer` equals `rank`, the rank waits for no
  // particular rank. `overdue` means that the wait will soon time out. The rank writes the note,
  // and removes it when the wait ends. Each thread passes its last note as `before` to the next
  // call and to ForgetAwaited. In the first call, `before` is 0. If several threads wait, the
  // latest note remains, except that another thread's note doesn't replace an overdue note. A wait
  // may stop being overdue (`Deadline::CountFrom`).
  uint32_t NoteAwaited(uint32_t rank, uint32_t peer, bool overdue, uint32_t before) const {
    std::atomic<uint32_t>& word = segment_->status(rank).awaits;
    const uint32_t own = (peer + 1) | (overdue ? kOverdue : 0), found = word.load(std::memory_order_relaxed);
    if (overdue || (found & kOverdue) == 0 || found == before) word.store(own, std::memory_order_relaxed);
    return own;
  }
  void ForgetAwaited(uint32_t rank, uint32_t noted) const {
    segment_->status(rank).awaits.compare_exchange_strong(noted, 0, std::memory_order_relaxed);
  }
  struct Awaited {
    uint32_t peer;
    bool overdue;
  };
  std::optional<Awaited> AwaitedBy(uint32_t rank) const;
  // Sets whether the launcher is about to end `rank`. Until the launcher ends the rank or resets
  // this value, the other ranks don't give up.
  void SetEnding(uint32_t rank, bool ending) {
    segment_->status(rank).is_ending.store(ending ? 1 : 0, std::memory_order_release);
  }
  bool IsEnding(uint32_t rank) const { return segment_->status(rank).is_ending.load(std::memory_order_acquire) != 0; }

  bool IsWorker(uint32_t rank) const { return numbers_.empty() || rank < numbers_.size(); }
  uint32_t NumberOf(uint32_t rank) const { return rank < numbers_.size() ? numbers_[rank] : rank; }
  std::string PeerName(uint32_t rank) const override;

  // ---- for ranks that wait in this segment
  bool HasFailed(uint32_t rank) const {
    const Header& words = header();
    return std::count(words.failure_order, words.failure_order + num_failed(), static_cast<uint16_t>(rank)) > 0;
  }
  // Returns true if a rank has failed and the members can't continue without it. Such a rank is in
  // state kLost.
  bool AnyLost() const { return header().lost.load(std::memory_order_acquire) != 0; }
  // Returns true if `rank` has failed and the members can't continue without it. Returns false
  // during MarkLost, while this isn't decided yet.
  bool EndedForAll(uint32_t rank) const;
  // Returns the error of the lowest running rank that has called GiveUp for all ranks, or none if there
  // is no such rank.
  std::optional<Error> GaveUpForAll() const;

 private:
  static constexpr uint32_t kOverdue = 0x80000000u;

  Header& header() const { return segment_->header(); }

  const std::shared_ptr<Segment> segment_;
  const std::vector<uint32_t> numbers_;
};

}  // namespace kungfu::shm

#endif  // KUNGFU_TRANSPORT_SHM_SEGMENT_CONTROL_BLOCK_H_
