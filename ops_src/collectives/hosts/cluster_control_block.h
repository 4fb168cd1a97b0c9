// One rank's view of the control block in a cluster with several hosts.
#ifndef KUNGFU_COLLECTIVES_HOSTS_CLUSTER_CONTROL_BLOCK_H_
#define KUNGFU_COLLECTIVES_HOSTS_CLUSTER_CONTROL_BLOCK_H_

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collectives/hosts/protocol.h"
#include "transport/shm/segment_control_block.h"

namespace kungfu::hosts {

// The job's launchers announce failures (in a single order), cluster versions and sync points in a
// segment that contains all ranks. A rank makes its own announcements in its host's segment, for
// the other ranks and the launcher of that host. About a rank on another host, a rank knows only
// what the launchers pass on, and whether that rank had the training state when it joined.
//
// Thread-safe.
class ClusterControlBlock final : public ControlBlock {
 public:
  // `local` is the segment of host number `host`.
  ClusterControlBlock(const std::shared_ptr<shm::Segment>& control_segment, const std::shared_ptr<shm::Segment>& local,
                      const Places& places, uint32_t host)
      : all_(control_segment), local_(local), places_(places), host_(host), has_state_(places.ranks()) {}

  uint32_t size() const override { return all_.size(); }
  uint64_t cluster_version() const override { return all_.cluster_version(); }
  bool recovers() const override { return all_.recovers(); }

  void Announce(uint64_t version) override { all_.Announce(version); }
  uint64_t announced() const override { return all_.announced(); }
  void HoldDeadlines(bool held) override { all_.HoldDeadlines(held); }
  bool deadlines_held() const override { return all_.deadlines_held(); }
  void MarkLost(uint32_t rank, const std::string& reason, bool recover, bool reaped) override {
    all_.MarkLost(rank, reason, recover, reaped);
  }
  std::string LostReason(uint32_t rank) const override { return all_.LostReason(rank); }
  uint32_t num_failed() const override { return all_.num_failed(); }
  uint32_t FailedRank(uint32_t index) const override { return all_.FailedRank(index); }

  bool Attach(uint32_t rank, const std::string& address, bool has_state) override {
    return local_.Attach(places_.LocalOf(rank), address, has_state);
  }
  std::string Address(uint32_t rank) const override {
    return IsHere(rank) ? local_.Address(places_.LocalOf(rank)) : all_.Address(rank);
  }
  bool HasState(uint32_t rank) const override { return has_state_[rank]; }
  // Sets which ranks had the training state when they joined. Call it before any other thread uses
  // this control block.
  void SetStates(std::vector<bool> has_state) { has_state_ = std::move(has_state); }
  void Leave(uint32_t rank) override { local_.Leave(places_.LocalOf(rank)); }
  RankState State(uint32_t rank) const override {
    const RankState state = all_.State(rank);
    return IsHere(rank) && state != RankState::kLost ? local_.State(places_.LocalOf(rank)) : state;
  }
  void Beat(uint32_t rank) override { local_.Beat(places_.LocalOf(rank)); }
  uint32_t Heartbeat(uint32_t rank) const override {
    return IsHere(rank) ? local_.Heartbeat(places_.LocalOf(rank)) : all_.Heartbeat(rank);
  }
  void NoteStep(uint32_t rank, uint64_t step, std::chrono::nanoseconds each) override {
    local_.NoteStep(places_.LocalOf(rank), step, each);
  }
  void NoteActivity(uint32_t rank, uint32_t activity) override { local_.NoteActivity(places_.LocalOf(rank), activity); }
  void SetBusy(uint32_t rank, bool busy) override { local_.SetBusy(places_.LocalOf(rank), busy); }
  bool IsBusy(uint32_t rank) const override {
    return IsHere(rank) ? local_.IsBusy(places_.LocalOf(rank)) : all_.IsBusy(rank);
  }
  void GiveUp(uint32_t rank, GaveUp how, kf_status status, const std::string& text) override {
    local_.GiveUp(places_.LocalOf(rank), how, status, text);
  }
  std::string GaveUpAlone(uint32_t rank) const override {
    return IsHere(rank) ? local_.GaveUpAlone(places_.LocalOf(rank)) : all_.GaveUpAlone(rank);
  }

  void RequestSyncPoint(uint64_t number) override { all_.RequestSyncPoint(number); }
  uint64_t sync_points() const override { return all_.sync_points(); }

 private:
  bool IsHere(uint32_t rank) const { return places_.HostOf(rank) == host_; }

  shm::SegmentControlBlock all_, local_;
  const Places places_;
  const uint32_t host_;
  std::vector<bool> has_state_;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_CLUSTER_CONTROL_BLOCK_H_
