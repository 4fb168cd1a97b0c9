// How survivors proceed after a failure. The numbers are those of host_communicator.h.
//
// If a rank fails and the launcher's policy is to fail, each rank that waits throws PeerLostError
// when it next looks. If the policy is to recover, the survivors go on without it, all in the same
// way:
//
// 5. The words by which a rank publishes are fenced before its failure is announced
// (SegmentControlBlock::MarkLost). From then on they never change. Owner and launcher change a word
// by compare-and-swap and fetch-or, so one of them is first. A rank that is expelled while it lives
// can't publish, and learns so: see 11.
// Test: WithoutOne.AnExpelledProcessLearnsItAndPublishesNothing
//
// 6. A rank's contribution to an operation is *finished* when its last word there is published: its
// post, if all is in place with it; else its last `ready`, and in a split its last `reduced`. (A
// broadcast needs only the root's.) No rank returns before it has seen the last word of all
// members: it waits for all posts, and reads no chunk before it is there.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverOneFails
//
// If operations differ, the last word of a rank that has seen so is its complaint, and it returns
// after it has seen all complaints. A rank that hasn't seen it yet judges the failed rank's
// contribution by its own operation. If it takes it for unfinished it leaves without a complaint.
// If it takes it for finished it goes on and sees the difference. If the failed rank has
// complained, it has seen all posts, so all are there and all ranks come to complain. If it hasn't,
// no rank returns, and those that wait for a complaint leave too. So:
// - If the failed rank's contribution is finished, its buffers and words hold all that is still to
//   be read. No rank waits for it any more: it reads nothing, so its `done` isn't awaited. All
//   ranks end the operation with it.
// - If not, no rank has ended the operation and none can. All ranks repeat it without the failed
//   rank.
// Test: WithoutOne.AMismatchIsStillAMismatch
// Test: WithoutOne.AMismatchIsStillAMismatchIfAFailedRankHadPosted
//
// Which of the two holds is read from words that don't change any more. So every survivor reads the
// same.
//
// 11. A rank that is expelled while it lives (the launcher couldn't end it) may be between any two
// instructions, and continue there at any time. What it does then is harmless:
// - Its counters are fenced, and before them the word by which it gives up. So nothing that follows
//   from the expulsion makes other ranks give up, and they ignore what it had said before once it
//   is in the list of failures. Its next step fails, or its next look finds it in that list. Then
//   it closes its own communicator only.
// - It writes plainly to its own mailboxes, buffers, complaints and status. Other ranks read of
//   these only what its counters had announced. To overwrite that, it would have to announce
//   something else first: k+2 overwrites post k after k+1; a buffer is overwritten after the others
//   are done with it; a chunk of another operation is in a staging buffer that all ranks have left.
//   The parts of its buffers that others write are none.
// - It raises `left` only in an operation that it has ended, in which it counts. If it is the last,
//   it gives back, late, a staging buffer that no other rank can give back or use until then. The
//   channel is its own for as long (ChannelHead::users). Hence `left` and the staging word are
//   still those of that operation: no later one of the same name and generation can end without it.
// - A staging buffer that it takes is free, or another rank has bound it to the operation. One
//   compare-and-swap decides which rank binds, and the second one gives back what it took. If the
//   rank is never seen again, the staging buffer stays bound.
// - The table of names: channel_table.h.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverOneIsGivenUpAndGoesOn
// Test: WithoutOne.ExpelledProcessMakesNoOtherGiveUp
#include "collectives/host/failure_rules.h"

#include "base/interrupt.h"

namespace kungfu::host {

// As long as no staging buffer is bound here, or no difference seen, it may turn out later that something is missing.
bool FailureRules::HasFinished(uint32_t rank, const Flight& flight) const {
  const shm::Segment& segment = self_.segment;
  if (segment.complaint(flight.channel, rank).sequence.Reached(flight.sequence)) return true;
  if (flight.differs) return false;
  if (!segment.mailbox(flight.channel, rank, flight.sequence).sequence.Reached(flight.sequence)) return false;
  if (flight.AtOnce() || !flight.Brings(rank) || !flight.bound) return true;
  return flight.splits ? segment.reduced(flight.staging_buffer, rank).Reached(flight.base_reduced + flight.chunks)
                       : segment.ready(flight.staging_buffer, rank).Reached(flight.base + flight.chunks);
}

void FailureRules::CheckFailures(const Flight& flight) const {
  const uint32_t num_failed = self_.control.num_failed();
  for (uint32_t d = flight.generation; d < num_failed; d++) {
    const uint32_t failed = self_.control.FailedRank(d);
    if (failed == self_.rank) ThrowExpelled();
    if (!HasFinished(failed, flight)) throw Unfinished{};
  }
}

void FailureRules::ThrowExpelled() const {
  throw Expelled(KF_PEER_LOST,
                 Text("this process, ", self_.control.PeerName(self_.rank), ", has been expelled from cluster version ",
                      self_.cluster_version, ": it ", self_.control.LostReason(self_.rank)));
}

void FailureRules::ThrowIfClosed() const {
  self_.process.Refuse("take part in collectives");
  self_.closure.ThrowIfClosed();
}

void FailureRules::ThrowIfPointless(const std::string& title) const {
  ThrowIfClosed();
  ThrowIfLost(title);
  if (HasFailed(self_.rank)) ThrowExpelled();
  ThrowIfGivenUp();
}

void FailureRules::ThrowIfPointless(const Flight& flight) const {
  InterruptCheck::Run();
  ThrowIfClosed();
  if (self_.control.AnyLost()) ThrowIfLost(flight.Title());
  CheckFailures(flight);
  ThrowIfGivenUp();
}

void FailureRules::ThrowIfPointless(const shm::Counter& counter, uint32_t target, uint32_t peer,
                                    const Flight& flight) const {
  ThrowIfPointless(flight);
  // First its state, then the counter: it may have brought its part and left right after.
  if (self_.control.State(peer) == RankState::kLeft && !counter.Reached(target)) {
    throw Error(KF_PEER_LOST, Text(flight.Title(), self_.control.PeerName(peer),
                                   " has finished and left, cluster version ", self_.cluster_version));
  }
}

void FailureRules::ThrowIfPointless(const Operation& operation, RunTime::Clock::duration waited) const {
  const std::string title = TitleOf(operation);
  ThrowIfPointless(title);
  const auto limit = self_.options.collective_timeout;
  if (waited > limit) {
    throw Error(KF_TIMEOUT, Text(title, "the table of names was not given back within ", limit.count() / 1000.0,
                                 " s, cluster version ", self_.cluster_version));
  }
}

void FailureRules::ThrowIfLost(const std::string& title) const {
  if (!self_.control.AnyLost()) return;
  std::string lost;
  for (uint32_t r = 0; r < self_.size; r++) {
    if (HasFailed(r) || self_.control.State(r) != RankState::kLost)
      continue;  // of the failed ranks: that alone would be no reason
    lost += Text(lost.empty() ? "" : ", ", self_.control.PeerName(r), " ", self_.control.LostReason(r));
  }
  throw Error(KF_PEER_LOST, Text(title, lost, ", cluster version ", self_.cluster_version));
}

void FailureRules::ThrowIfGivenUp() const {
  if (const auto error = self_.control.GaveUpForAll()) throw Error(*error);
}

}  // namespace kungfu::host
