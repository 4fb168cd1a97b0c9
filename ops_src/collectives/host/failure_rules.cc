// What survivors make of a death. (The numbers are those of host_communicator.h.)
//
// When a rank dies, and the launcher's policy is to fail, whoever waits for anybody throws PeerLostError when it next
// looks. When the policy is to recover, the others go on without it, all of them alike:
//
//  5. The words by which a rank publishes are fenced before its death is announced (shm::Board::MarkLost): what they
//  say
//     then they say forever. Owner and launcher change a word by compare-and-swap and fetch-or, so that one of them is
//     first, and a rank that is expelled though it lives can't publish and learns it: see 11.
//  6. A rank's part in an operation is *finished* when its last word there is out: its post, if all is in place with
//     it; else its last `ready`, and in a split its last `reduced`. (A broadcast needs only the root's.) Nobody returns
//     before he has seen everybody's last word: he waits for all posts, and no chunk can be read before it is there.
//     Where operations differ, the last word is the complaint, and only that, for whoever has seen that they differ: he
//     returns after he has seen everybody's. Who has not seen it yet may take the dead rank's part for unfinished by
//     the measure of his own operation (then he leaves without a complaint) or for finished (then he comes to see that
//     they differ). If the dead rank has complained then it has seen all posts, so all are there and everybody comes to
//     complain; if not then nobody returns, and those who wait for a complaint leave as well. So:
//       - if the dead rank's part is finished then its buffers and words hold all that is still to be read, nobody
//         waits for it any more (it reads nothing, so its `done` is not waited for), and everybody ends the operation
//         with it;
//       - if not, then nobody has ended the operation, nor ever can, and everybody does it again without the dead rank.
//     Which of the two it is, is read from words that don't change any more, so every survivor reads the same.
// 11. A rank that is expelled while it lives (the launcher couldn't end it) may be between any two instructions, and go
//     on there at any time. What it does then harms nobody:
//       - Its counters, and the word by which it gives up, are fenced, that word first: nothing that follows from being
//         expelled makes the others give up, and what it had said before they disregard once it is in the list of
//         deaths. Its next step fails, or its next look finds it dead; it then closes its own communicator, no more.
//       - It writes plainly to its own mailboxes, buffers, complaints and status. Of these the others read only what
//         its counters had announced. To write that again it would have to announce something else first: post k is
//         written over by k+2, after k+1; a buffer after the others are done with it; another operation's chunk only in
//         a lane that everybody has left. The parts of its buffers that others write are none.
//       - `left`: counted up by it only in an operation that it has ended, in which it counts; if it is the last then
//         it gives back, late, a lane that nobody else can give back or use until then. The channel is its own for as
//         long (ChannelHead::users), hence `left` and the lane word are those of that operation still: no later one of
//         the same name and generation can be ended without it.
//       - A lane that it takes is free or has been bound to the operation by another; who binds is decided by one
//         compare-and-swap, and who comes second gives back what it took. If it is never seen again the lane stays
//         bound.
//       - The table of names: channel_table.h.
#include "collectives/host/failure_rules.h"

#include "base/interrupt.h"

namespace kungfu::host {

// As long as no lane is bound here, or no difference seen, it may turn out later that something is missing.
bool FailureRules::HasFinished(uint32_t rank, const Flight& flight) const {
  const shm::Segment& segment = self_.segment;
  if (segment.complaint(flight.channel, rank).sequence.Reached(flight.sequence)) return true;
  if (flight.differs) return false;
  if (!segment.mailbox(flight.channel, rank, flight.sequence).sequence.Reached(flight.sequence)) return false;
  if (flight.AtOnce() || !flight.Brings(rank) || !flight.bound) return true;
  return flight.splits ? segment.reduced(flight.lane, rank).Reached(flight.base_reduced + flight.chunks)
                       : segment.ready(flight.lane, rank).Reached(flight.base + flight.chunks);
}

void FailureRules::CheckDeaths(const Flight& flight) const {
  const uint32_t deaths = self_.board.deaths();
  for (uint32_t d = flight.generation; d < deaths; d++) {
    const uint32_t dead = self_.board.Death(d);
    if (dead == self_.rank) ThrowExpelled();
    if (!HasFinished(dead, flight)) throw Unfinished{};
  }
}

void FailureRules::ThrowExpelled() const {
  throw Expelled(KF_PEER_LOST,
                 Text("this process, ", self_.board.PeerName(self_.rank), ", has been expelled from cluster version ",
                      self_.cluster_version, ": it ", self_.board.LostReason(self_.rank)));
}

void FailureRules::ThrowIfClosed() const {
  self_.process.Refuse("take part in collectives");
  self_.closure.ThrowIfClosed();
}

void FailureRules::ThrowIfPointless(const std::string& title) const {
  ThrowIfClosed();
  ThrowIfLost(title);
  if (IsDead(self_.rank)) ThrowExpelled();
  ThrowIfGivenUp();
}

void FailureRules::ThrowIfPointless(const Flight& flight) const {
  InterruptCheck::Run();
  ThrowIfClosed();
  if (self_.board.AnyLost()) ThrowIfLost(flight.Title());
  CheckDeaths(flight);
  ThrowIfGivenUp();
}

void FailureRules::ThrowIfPointless(const shm::Counter& counter, uint32_t target, uint32_t peer,
                                    const Flight& flight) const {
  ThrowIfPointless(flight);
  // First its state, then the counter: it may have brought its part and left right after.
  if (self_.board.State(peer) == RankState::kLeft && !counter.Reached(target)) {
    throw Error(KF_PEER_LOST, Text(flight.Title(), self_.board.PeerName(peer),
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
  if (!self_.board.AnyLost()) return;
  std::string lost;
  for (uint32_t r = 0; r < self_.size; r++) {
    if (IsDead(r) || self_.board.State(r) != RankState::kLost) continue;  // of the dead: that alone would be no reason
    lost += Text(lost.empty() ? "" : ", ", self_.board.PeerName(r), " ", self_.board.LostReason(r));
  }
  throw Error(KF_PEER_LOST, Text(title, lost, ", cluster version ", self_.cluster_version));
}

void FailureRules::ThrowIfGivenUp() const {
  if (const auto error = self_.board.GaveUpForAll()) throw Error(*error);
}

}  // namespace kungfu::host
