// Determines how survivors proceed after a failure. Several files share the numbering of the
// invariants: see host_communicator.h.
//
// If a rank fails and the launcher's policy is to fail, each waiting rank throws PeerLostError at
// its next check. If the policy is to recover, all survivors agree on how to continue without the
// failed rank:
//
// 5. A rank publishes data by changing words in shared memory. Before the launcher announces the
// rank's failure, it fences these words (SegmentControlBlock::MarkLost). From then on, the words
// never change. The rank changes a word by compare-and-swap, and the launcher fences the word by
// fetch-or, so one of the two changes comes first. A rank that is expelled while its process is
// running detects the fence when it tries to publish (see invariant 11).
// Test: WithoutOne.AnExpelledProcessLearnsItAndPublishesNothing
//
// 6. A rank's contribution to an operation is *finished* when the rank has made its last update of
// a counter for that operation. If all data is in place before the rank posts, this update is the
// post. Otherwise it is the last update of `ready`, or of `reduced` in a split. (In a broadcast,
// only the root's contribution matters.) No rank returns before the contributions of all members
// are finished, because it waits for all posts, and reads each chunk only when the chunk is ready.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverOneFails
//
// If the ranks' operations differ, a rank that has seen the difference writes a complaint, which is
// its last update. The rank returns after it has seen all complaints. Before a rank sees the
// difference, it uses its own operation to decide whether the failed rank's contribution is
// finished. If not, the rank leaves without a complaint. If so, the rank continues and sees the
// difference. A failed rank that wrote a complaint had seen all posts, so all ranks write
// complaints. If the failed rank wrote no complaint, no rank returns, and the ranks that wait for
// this complaint leave too. In summary:
// - If the failed rank's contribution is finished, its buffers and counters contain everything that
//   the survivors still have to read. No rank waits for the failed rank's `done` counter. All ranks
//   end the operation with its contribution.
// - If the contribution isn't finished, no rank has ended the operation and no rank can end it. All
//   ranks repeat the operation without the failed rank.
// Test: WithoutOne.AMismatchIsStillAMismatch
// Test: WithoutOne.AMismatchIsStillAMismatchIfAFailedRankHadPosted
//
// Survivors choose between the two cases by counters that no longer change. So every survivor makes
// the same choice.
//
// 11. If the launcher can't kill a rank's process, it expels the rank while the process is still
// running. The process may have stopped at any instruction, and may continue at any time. Its later
// actions are harmless:
// - The expelled rank's counters are fenced. The word by which the rank announces that it gives up
//   is fenced before the counters. So the expulsion can't make other ranks give up. When the rank
//   is in the list of failures, other ranks ignore its earlier notices. The expelled rank's next
//   update fails, or its next check finds the rank in that list. Then the expelled rank closes only
//   its own communicator.
// - The expelled rank makes plain writes only to its own mailboxes, buffers, complaints and status,
//   to which no other rank writes. Other ranks read only data that its counters have announced. To
//   overwrite announced data, the expelled rank would first have to announce other data: post k+2
//   overwrites post k, but follows post k+1. A rank overwrites a buffer only after the other ranks
//   are done with it. A rank writes data of another operation to a staging buffer only after all
//   ranks have left that buffer.
// - The expelled rank increments `left` only in an operation that it has ended as a member. If the
//   expelled rank is the last rank to leave, it releases the staging buffer late. Until then, no
//   other rank can release or use the buffer, and the rank keeps its bit in the channel
//   (ChannelHead::users). So `left` and the staging word still belong to that operation: no later
//   operation with the same name and generation can end without this rank.
// - The expelled rank may take a free staging buffer while another rank binds a different one to
//   the operation. A compare-and-swap decides which of the two ranks binds its buffer. The other
//   rank releases its buffer. If the expelled rank's process never runs again, its staging buffer
//   stays bound.
// - channel_table.h explains why the expelled rank's changes to the channel table are harmless.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverOneIsGivenUpAndGoesOn
// Test: WithoutOne.ExpelledProcessMakesNoOtherGiveUp
#include "collectives/host/failure_rules.h"

#include "base/interrupt.h"

namespace kungfu::host {

// Returns true if the contribution of `rank` is finished, as far as this rank knows. The answer may
// change from true to false when this rank binds a staging buffer or sees that the operations
// differ.
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
  // Read the state before the counter, because the peer may contribute and leave between the two
  // reads.
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
    throw Error(KF_TIMEOUT, Text(title, "another rank has held the lock of the channel table for more than ",
                                 limit.count() / 1000.0, " s, cluster version ", self_.cluster_version));
  }
}

void FailureRules::ThrowIfLost(const std::string& title) const {
  if (!self_.control.AnyLost()) return;
  std::string lost;
  for (uint32_t r = 0; r < self_.size; r++) {
    if (HasFailed(r) || self_.control.State(r) != RankState::kLost)
      continue;  // not a reason to throw, because the other ranks recover from this failure
    lost += Text(lost.empty() ? "" : ", ", self_.control.PeerName(r), " ", self_.control.LostReason(r));
  }
  throw Error(KF_PEER_LOST, Text(title, lost, ", cluster version ", self_.cluster_version));
}

void FailureRules::ThrowIfGivenUp() const {
  if (const auto error = self_.control.GaveUpForAll()) throw Error(*error);
}

}  // namespace kungfu::host
