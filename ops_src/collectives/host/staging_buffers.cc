// The numbers are those of host_communicator.h.
//
// 4. The first rank that needs the staging buffer of an operation picks it, and the last rank that
// leaves gives it back. A staging buffer belongs to one operation, so that names in flight side by
// side can't fill each other's memory. The lowest free one is taken, so that operations one after
// another stay in the same, cached, memory.
// Test: Names.AnyNumberOfLargeOperationsMayBeInFlight
//
// 10. The staging buffer of an operation that failed, or of which a member failed before it left,
// stays bound. There are at most as many as operations in flight at a failure, until the next
// cluster version has a new segment. A rank that finds no free one waits.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverOneFails
//
// 12. Pinned buffers. Some operations (pins_buffer) keep their staging buffer after their end. Each
// member leaves when it lets go of it (Pinned). Until all have, only its owner writes to a buffer
// there, so what was staged stays as it was. A member may write into its own buffers, and announce
// that by an operation of another name. The other members then read it before they let go. A member
// that fails before it let go leaves the staging buffer bound, as in 10. More operations that wait
// for other hosts mean more such buffers. A version with a failed member is over soon, and its
// buffers with it.
// Test: PinnedBuffers.WaitForALateReader
// Test: PinnedBuffers.HaveFencedWordsOfFailedRanks
//
// A buffer may stay pinned for as long as other hosts take. No rank that waits for a staging buffer
// must wait for that. So pinned buffers have a range of their own, for which no rank waits. The
// rank that picks takes one of that range if one is free, and an ordinary one otherwise. By its
// number all members know whether it is pinned. A member begins the next operation of the name
// after it has let go, so the argument for `left` holds.
// Test: PinnedBuffers.AreNotWaitedFor
// Test: PinnedBuffers.LeaveBuffersFreeWhileOtherHostsAreAwaited
#include "collectives/host/staging_buffers.h"

#include <utility>

#include "base/fault_point.h"

namespace kungfu::host {

void StagingBuffers::Bind(Flight& flight) const {
  flight.staging_buffer = Pick(flight);
  flight.pinned = Pins(flight) && flight.staging_buffer >= shm::kStagingBuffers;
  flight.base = self_.segment.done(flight.staging_buffer, self_.rank).Count();
  flight.base_reduced = self_.segment.reduced(flight.staging_buffer, self_.rank).Count();
  flight.bound = true;
  KUNGFU_FAULT_POINT("after a staging buffer is bound");
}

bool StagingBuffers::Pins(const Flight& flight) {
  return flight.operation.part.pins_buffer && flight.FitsStagingBuffer();
}

// The staging buffer of this operation; waits if all are in use, so that any number of operations may be in flight. The
// wait ends, because all ranks end each operation that has one. The exception runs into the deadline: a rank brings
// them only after others that wait here (more than kStagingBuffers in flight, in different orders, and not a thread for
// each).
uint32_t StagingBuffers::Pick(Flight& flight) const {
  std::atomic<uint64_t>& word = self_.segment.channel(flight.channel).staging_buffer[flight.sequence & 1];
  shm::Counter& waiters = self_.segment.header().staging_waiters;
  uint64_t seen = word.load(std::memory_order_acquire);
  std::optional<uint32_t> staging_buffer;
  Awaiting awaiting(self_.control, self_.rank);
  for (bool armed_before = false;;) {
    if (seen >> 32 == flight.sequence) return static_cast<uint32_t>(seen) - 1;
    if (Pins(flight)) staging_buffer = Take(kPinned);
    if (!staging_buffer) staging_buffer = Take(kOrdinary);
    if (staging_buffer) break;
    const uint32_t armed = waiters.Arm();
    std::atomic_thread_fence(std::memory_order_seq_cst);  // what is given back or bound from here on wakes
    seen = word.load(std::memory_order_acquire);
    if (!std::exchange(armed_before, true)) continue;  // one more look
    rules_.ThrowIfPointless(flight);
    const auto now = std::chrono::steady_clock::now();
    const auto in_flight = [&] {
      return Text(shm::kStagingBuffers, " operations that need staging are in flight, cluster version ",
                  self_.cluster_version);
    };
    if (waiting_.DeadlinePassed(flight, now)) {
      throw Error(KF_TIMEOUT, Text(flight.Title(), "no room ", flight.deadline->Limit(), ", ", in_flight()));
    }
    flight.deadline->Tell(now, [&](double seconds) {
      return Text(flight.Title(), self_.control.PeerName(self_.rank), " has waited ", static_cast<int>(seconds),
                  " s for room, ", in_flight());
    });
    awaiting.NoteNoPeer();
    waiters.Sleep(armed, kSlice);
    armed_before = false;
  }
  KUNGFU_FAULT_POINT("between taking a staging buffer and binding it");
  const uint64_t bound = static_cast<uint64_t>(flight.sequence) << 32 | (*staging_buffer + 1);
  if (word.compare_exchange_strong(seen, bound, std::memory_order_acq_rel, std::memory_order_acquire)) {
    WakeWaiters();
    return *staging_buffer;
  }
  GiveBack(*staging_buffer);  // another rank was first
  return static_cast<uint32_t>(seen) - 1;
}

std::atomic<uint64_t>& StagingBuffers::InUse(Range range) const {
  shm::Header& header = self_.segment.header();
  return range.first == kPinned.first ? header.pinned_buffers : header.staging_buffers;
}

// The lowest that is free, which is now this rank's to bind; none: all are in use.
std::optional<uint32_t> StagingBuffers::Take(Range range) const {
  std::atomic<uint64_t>& staging_buffers = InUse(range);
  uint64_t used = staging_buffers.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t bit = ~used & (used + 1);
    const uint32_t at = bit == 0 ? range.count : static_cast<uint32_t>(__builtin_ctzll(bit));
    if (at >= range.count) return std::nullopt;
    if (staging_buffers.compare_exchange_weak(used, used | bit, std::memory_order_acquire, std::memory_order_relaxed)) {
      return range.first + at;
    }
  }
}

void StagingBuffers::GiveBack(uint32_t staging_buffer) const {
  const Range& range = staging_buffer < shm::kStagingBuffers ? kOrdinary : kPinned;
  InUse(range).fetch_and(~(uint64_t{1} << (staging_buffer - range.first)), std::memory_order_seq_cst);
  WakeWaiters();
}

// After a change that they wait for, made by a read-modify-write. Either this sees the flag of a waiting rank, or that
// rank, which sets it and then looks once more, sees the change.
void StagingBuffers::WakeWaiters() const {
  shm::Counter& waiters = self_.segment.header().staging_waiters;
  if ((waiters.value.load(std::memory_order_seq_cst) & shm::Counter::kSleeps) == 0) return;
  KUNGFU_FAULT_POINT("between a staging buffer's change and the wake-up");
  waiters.Stir();
}

// `left` of this parity is next used two operations later, which no rank reaches before all have left this one. A rank
// that fails in between never leaves: the staging buffer then stays bound until the cluster version ends.
void StagingBuffers::Leave(uint32_t channel, uint32_t sequence, size_t members, bool failed) const {
  const shm::Segment& segment = self_.segment;
  shm::ChannelHead& head = segment.channel(channel);
  std::atomic<uint32_t>& left = head.left[sequence & 1];
  if (left.fetch_add(1, std::memory_order_acq_rel) + 1 < members) return;
  KUNGFU_FAULT_POINT("as the last to leave");
  left.store(0, std::memory_order_relaxed);
  const uint64_t bound = head.staging_buffer[sequence & 1].load(std::memory_order_acquire);
  if (bound >> 32 != sequence) return;  // a mismatch of operations that needed none
  const uint32_t staging_buffer = static_cast<uint32_t>(bound) - 1;
  if (failed) {
    for (uint32_t r = 0; r < self_.size; r++) {
      segment.ready(staging_buffer, r).Clear();
      segment.reduced(staging_buffer, r).Clear();
      segment.done(staging_buffer, r).Clear();
    }
  }
  GiveBack(staging_buffer);
}

}  // namespace kungfu::host
