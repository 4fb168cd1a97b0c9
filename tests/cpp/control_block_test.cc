// A communicator whose members talk by another control block than a segment's: nothing in the interfaces is of shared
// memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "base/interrupt.h"
#include "collectives/communicator.h"
#include "transport/control_block.h"

namespace kungfu::testing {
namespace {

// In this process's memory.
class PlainControlBlock final : public ControlBlock {
 public:
  struct Rank {
    std::string address, lost_reason, text;
    bool has_state = false, busy = false;
    RankState state = RankState::kAbsent;
    GaveUp gave_up = GaveUp::kNo;
    kf_status status = KF_OK;
    uint32_t heartbeat = 0;
    uint64_t step = 0;
  };

  PlainControlBlock(uint32_t size, bool recovers) : ranks(size), recovers_(recovers) {}

  uint32_t size() const override { return static_cast<uint32_t>(ranks.size()); }
  uint64_t cluster_version() const override { return 7; }
  bool recovers() const override { return recovers_; }
  void Announce(uint64_t version) override { announced_ = version; }
  uint64_t announced() const override { return announced_; }
  void HoldDeadlines(bool held) override { held_ = held; }
  bool deadlines_held() const override { return held_; }
  void MarkLost(uint32_t rank, const std::string& reason, bool, bool) override {
    ranks[rank].state = RankState::kLost;
    ranks[rank].lost_reason = reason;
    order_.push_back(rank);
  }
  std::string LostReason(uint32_t rank) const override { return ranks[rank].lost_reason; }
  uint32_t num_failed() const override { return static_cast<uint32_t>(order_.size()); }
  uint32_t FailedRank(uint32_t index) const override { return order_[index]; }
  bool Attach(uint32_t rank, const std::string& address, bool has_state) override {
    if (ranks[rank].state != RankState::kAbsent) return false;
    ranks[rank].address = address;
    ranks[rank].has_state = has_state;
    ranks[rank].state = RankState::kAttached;
    return true;
  }
  std::string Address(uint32_t rank) const override { return ranks[rank].address; }
  bool HasState(uint32_t rank) const override { return ranks[rank].has_state; }
  void Leave(uint32_t rank) override { ranks[rank].state = RankState::kLeft; }
  RankState State(uint32_t rank) const override { return ranks[rank].state; }
  void Beat(uint32_t rank) override { ranks[rank].heartbeat++; }
  uint32_t Heartbeat(uint32_t rank) const override { return ranks[rank].heartbeat; }
  void NoteStep(uint32_t rank, uint64_t step, std::chrono::nanoseconds) override { ranks[rank].step = step; }
  void NoteActivity(uint32_t, uint32_t) override {}
  void SetBusy(uint32_t rank, bool busy) override { ranks[rank].busy = busy; }
  bool IsBusy(uint32_t rank) const override { return ranks[rank].busy; }
  void GiveUp(uint32_t rank, kungfu::GaveUp how, kf_status status, const std::string& text) override {
    ranks[rank].gave_up = how;
    ranks[rank].status = status;
    ranks[rank].text = text;
  }
  std::string GaveUpAlone(uint32_t rank) const override {
    return ranks[rank].gave_up == kungfu::GaveUp::kAlone ? ranks[rank].text : "";
  }
  void RequestSyncPoint(uint64_t number) override { sync_points_ = std::max(sync_points_, number); }
  uint64_t sync_points() const override { return sync_points_; }

  std::vector<Rank> ranks;

 private:
  const bool recovers_;
  uint64_t announced_ = 7, sync_points_ = 0;
  bool held_ = false;
  std::vector<uint32_t> order_;
};

// Moves no data.
class Idle final : public Communicator {
 public:
  Idle(PlainControlBlock& control, uint32_t rank)
      : Communicator(rank, control.size(), control.cluster_version()), control_(control) {
    control.Attach(rank, "10.0.0." + std::to_string(rank) + ":1", /*has_state=*/rank > 0);
  }
  uint32_t Run(const Operation&) override { return closure_.ThrowIfClosed(), 0; }
  uint32_t RunAll(const Operation*, size_t) override { return 0; }
  uint32_t Settle(const Operation*, uint32_t*, size_t) override { return 0; }
  std::optional<uint32_t> RunRenewable(Renewable&, uint32_t) override { return 0; }

 private:
  ControlBlock* control() const override { return &control_; }
  PlainControlBlock& control_;
};

TEST(ControlBlockTest, AGenerationIsTheClusterWithoutItsFirstFailedRanks) {
  PlainControlBlock control(4, /*recovers=*/true);
  Idle zero(control, 0), one(control, 1), two(control, 2), three(control, 3);
  EXPECT_EQ(three.StateRoot(), 1u);
  control.MarkLost(1, "was killed", true, true);
  control.MarkLost(0, "was killed", true, true);
  EXPECT_EQ(three.MembersOf(0), (Members{0, 1, 2, 3}));
  EXPECT_EQ(three.MembersOf(1), (Members{0, 2, 3}));
  EXPECT_EQ(three.Living(), (Members{2, 3}));
  EXPECT_EQ(three.StateRoot(), 2u);
}

TEST(ControlBlockTest, SyncPointsAndPreparedVersionsAreSeenByAll) {
  PlainControlBlock control(2, /*recovers=*/true);
  Idle zero(control, 0), one(control, 1);
  zero.RequestSyncPoint(2);
  control.Announce(9);
  one.SetBusy(true);
  EXPECT_EQ(one.sync_points(), 2u);
  EXPECT_EQ(one.announced(), 9u);
  EXPECT_TRUE(control.IsBusy(1) && !control.IsBusy(0));
  one.Leave();
  EXPECT_EQ(control.State(1), RankState::kLeft);
}

TEST(ControlBlockTest, RankThatFailsAloneIsRemovedAloneOnlyIfOthersRecover) {
  for (const bool recovers : {true, false}) {
    PlainControlBlock control(2, recovers);
    Idle zero(control, 0), one(control, 1);
    one.Beat();
    one.GiveUp(Interrupted("KeyboardInterrupt"));
    one.Beat();
    EXPECT_EQ(control.Heartbeat(1), recovers ? 1u : 2u) << "its heart stands still where the launcher is to end it";
    EXPECT_EQ(control.ranks[1].gave_up, recovers ? GaveUp::kAlone : GaveUp::kForAll);
    EXPECT_EQ(control.ranks[1].status, KF_ABORTED);
    EXPECT_EQ(control.GaveUpAlone(1).empty(), !recovers);
    EXPECT_THROW(one.Run({}), Closed);
    zero.Run({});  // it has not looked yet
  }
}

TEST(ControlBlockTest, ADeadlineThatPassedIsForAllAndTheFirstReasonStays) {
  PlainControlBlock control(2, /*recovers=*/true);
  Idle zero(control, 0), one(control, 1);
  one.GiveUp(Error(KF_TIMEOUT, "too late"));
  one.GiveUp(Error(KF_INTERNAL, "no memory"));
  EXPECT_EQ(control.ranks[1].gave_up, GaveUp::kForAll);
  EXPECT_EQ(control.ranks[1].text, "rank 1 (10.0.0.1:1) gave up: too late");
}

}  // namespace
}  // namespace kungfu::testing
