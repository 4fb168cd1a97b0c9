// (The numbers are those of host_communicator.h.)
//
//  4. The lane of an operation is picked by the first rank to need it and given back by the last to leave. Lanes
//     belong to operations, so that names in flight side by side can't fill each other's buffers; the lowest free lane
//     is taken, so that operations one after another stay in the same, cached, memory.
// 10. Lanes of operations that failed, or whose member died before it left, stay bound: at most those in flight at a
//     death, until the next cluster version brings a new segment. Who finds no lane waits for one.
// 12. Kept lanes. Of some operations (keeps_lane) all members keep the lane when they have ended it, until each
//     lets go of it (Kept), which is when it leaves. As long as one hasn't, nobody writes to a buffer there but its
//     owner: what was staged stays as it was, and a member may put something into its own buffers and tell the others
//     of it, by an operation of another name, which they read before they let go. A member that dies without having
//     let go leaves the lane bound, as in 10: the more, the more operations wait for other hosts. A version one of
//     whose members has died is over soon, and these with it.
//     A lane that is kept may be so for as long as other hosts take. So that those who wait for room never wait for
//     that, there are lanes of their own for it, for which nobody waits: who picks the operation's lane takes one of
//     them where one is free and else an ordinary one, and by its number all members know whether it is kept.
//     A member begins the next operation of the name when it has let go: so the argument for `left` holds as it is.
#include "collectives/host/lanes.h"

#include <utility>

#include "base/fault_point.h"

namespace kungfu::host {

void Lanes::Bind(Flight& flight) const {
  flight.lane = Pick(flight);
  flight.kept = Keeps(flight) && flight.lane >= shm::kLanes;
  flight.base = self_.segment.done(flight.lane, self_.rank).Count();
  flight.base_reduced = self_.segment.reduced(flight.lane, self_.rank).Count();
  flight.bound = true;
  KUNGFU_FAULT_POINT("after a lane is bound");
}

bool Lanes::Keeps(const Flight& flight) { return flight.operation.part.keeps_lane && flight.FitsLane(); }

// The lane of this operation; waits where all are in use, so that any number of operations may be in flight. That ends:
// of those that have one each will be ended by all ranks, unless some rank brings them only after others that wait here
// (more than kLanes in flight, in different orders, and not a thread for each), which runs into the deadline.
uint32_t Lanes::Pick(Flight& flight) const {
  std::atomic<uint64_t>& word = self_.segment.channel(flight.channel).lane[flight.sequence & 1];
  shm::Counter& waiters = self_.segment.header().lane_waiters;
  uint64_t seen = word.load(std::memory_order_acquire);
  std::optional<uint32_t> lane;
  Awaiting awaiting(self_.board, self_.rank);
  for (bool armed_before = false;;) {
    if (seen >> 32 == flight.sequence) return static_cast<uint32_t>(seen) - 1;
    if (Keeps(flight)) lane = Take(kKept);
    if (!lane) lane = Take(kOrdinary);
    if (lane) break;
    const uint32_t armed = waiters.Arm();
    std::atomic_thread_fence(std::memory_order_seq_cst);  // what is given back or bound from here on wakes
    seen = word.load(std::memory_order_acquire);
    if (!std::exchange(armed_before, true)) continue;  // one more look
    rules_.ThrowIfPointless(flight);
    const auto now = std::chrono::steady_clock::now();
    const auto in_flight = [&] {
      return Text(shm::kLanes, " operations that need staging are in flight, cluster version ", self_.cluster_version);
    };
    if (waiting_.DeadlinePassed(flight, now)) {
      throw Error(KF_TIMEOUT,
                  Text(flight.Title(), "no free staging buffer ", flight.deadline->Limit(), ", ", in_flight()));
    }
    flight.deadline->Tell(now, [&](double seconds) {
      return Text(flight.Title(), self_.board.PeerName(self_.rank), " has waited ", static_cast<int>(seconds),
                  " s for a free staging buffer, ", in_flight());
    });
    awaiting.NoteNoPeer();
    waiters.Sleep(armed, kSlice);
    armed_before = false;
  }
  KUNGFU_FAULT_POINT("between taking a lane and binding it");
  const uint64_t bound = static_cast<uint64_t>(flight.sequence) << 32 | (*lane + 1);
  if (word.compare_exchange_strong(seen, bound, std::memory_order_acq_rel, std::memory_order_acquire)) {
    WakeWaiters();
    return *lane;
  }
  GiveBack(*lane);  // another rank was first
  return static_cast<uint32_t>(seen) - 1;
}

std::atomic<uint64_t>& Lanes::InUse(Range range) const {
  shm::Header& header = self_.segment.header();
  return range.first == kKept.first ? header.kept_lanes : header.lanes;
}

// The lowest that is free, which is now this rank's to bind; none: all are in use.
std::optional<uint32_t> Lanes::Take(Range range) const {
  std::atomic<uint64_t>& lanes = InUse(range);
  uint64_t used = lanes.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t bit = ~used & (used + 1);
    const uint32_t at = bit == 0 ? range.count : static_cast<uint32_t>(__builtin_ctzll(bit));
    if (at >= range.count) return std::nullopt;
    if (lanes.compare_exchange_weak(used, used | bit, std::memory_order_acquire, std::memory_order_relaxed)) {
      return range.first + at;
    }
  }
}

void Lanes::GiveBack(uint32_t lane) const {
  const Range& range = lane < shm::kLanes ? kOrdinary : kKept;
  InUse(range).fetch_and(~(uint64_t{1} << (lane - range.first)), std::memory_order_seq_cst);
  WakeWaiters();
}

// After a change that they wait for, made by a read-modify-write. Either this sees the flag of one who waits, or that
// one, who sets it and then looks once more, sees the change.
void Lanes::WakeWaiters() const {
  shm::Counter& waiters = self_.segment.header().lane_waiters;
  if ((waiters.value.load(std::memory_order_seq_cst) & shm::Counter::kSleeps) == 0) return;
  KUNGFU_FAULT_POINT("between a lane's change and the wake-up");
  waiters.Stir();
}

// `left` of this parity is next used two operations later, which nobody reaches before everybody has left this one. Who
// dies in between leaves no more: the lane then stays bound until the cluster version ends.
void Lanes::Leave(uint32_t channel, uint32_t sequence, size_t members, bool failed) const {
  const shm::Segment& segment = self_.segment;
  shm::ChannelHead& head = segment.channel(channel);
  std::atomic<uint32_t>& left = head.left[sequence & 1];
  if (left.fetch_add(1, std::memory_order_acq_rel) + 1 < members) return;
  KUNGFU_FAULT_POINT("as the last to leave");
  left.store(0, std::memory_order_relaxed);
  const uint64_t bound = head.lane[sequence & 1].load(std::memory_order_acquire);
  if (bound >> 32 != sequence) return;  // a mismatch of operations that needed none
  const uint32_t lane = static_cast<uint32_t>(bound) - 1;
  if (failed) {
    for (uint32_t r = 0; r < self_.size; r++) {
      segment.ready(lane, r).Clear();
      segment.reduced(lane, r).Clear();
      segment.done(lane, r).Clear();
    }
  }
  GiveBack(lane);
}

}  // namespace kungfu::host
