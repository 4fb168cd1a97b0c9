// Implements the lifecycle of staging buffers. Several files share the numbering of the invariants:
// see host_communicator.h.
//
// 4. The first rank that needs a staging buffer for an operation picks it, and the last rank that
// leaves the operation releases it. A staging buffer belongs to one operation, so concurrent
// operations with different names can't overwrite each other's data. A rank takes the free staging
// buffer with the lowest number, so consecutive operations use the same memory, which is still
// cached.
// Test: Names.AnyNumberOfLargeOperationsMayBeInFlight
//
// 10. A staging buffer stays bound to its operation if the operation failed, or if a member failed
// before leaving the operation. If a member fails, each operation that is running at that time
// leaves at most one bound buffer. These buffers stay bound until the next cluster version, which
// has a new segment. A rank that finds no free staging buffer waits.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverOneFails
//
// 12. Pinned buffers. Some operations (`pins_buffer`) keep their staging buffer after they have
// ended. Each member leaves the operation when it releases the buffer (`Pinned`). Until all members
// have left, each rank writes only to its own part of the buffer. So staged data stays unchanged. A
// member may write new data into its own part, and announce this data by an operation with another
// name. The other members read this data before they release the buffer. If a member fails before
// it releases the buffer, the buffer stays bound, as in 10. The number of these bound buffers grows
// with the number of operations that wait for other hosts. A cluster version with a failed member
// ends soon, and its segment ends at the same time.
// Test: PinnedBuffers.WaitForALateReader
// Test: PinnedBuffers.HaveFencedWordsOfFailedRanks
//
// A buffer may stay pinned while its members wait for other hosts. But a rank that waits for a
// staging buffer must not depend on other hosts. So pinned buffers have a separate range of
// numbers, and no rank waits for a buffer in this range. The rank that picks a buffer takes a free
// buffer from this range, or an ordinary buffer if there is none. The buffer's number shows all
// members whether the buffer is pinned. A member begins the next operation with the same name only
// after it has released the buffer. So the argument about `left` (see Leave) applies here too.
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

// Picks the staging buffer for this operation. Waits if all buffers are in use, so any number of
// operations may be in flight. The wait ends, because all ranks end each operation that has a
// staging buffer. The wait reaches its deadline only if all these conditions hold:
// - more than kStagingBuffers operations are in flight;
// - the ranks contribute to these operations in different orders;
// - a rank has fewer threads than operations, so operations that wait here delay its contributions
//   to other operations.
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
    std::atomic_thread_fence(std::memory_order_seq_cst);  // from here on, each release or binding of a buffer wakes
                                                          // this rank
    seen = word.load(std::memory_order_acquire);
    if (!std::exchange(armed_before, true)) continue;  // check the buffers again
    rules_.ThrowIfPointless(flight);
    const auto now = std::chrono::steady_clock::now();
    const auto in_flight = [&] {
      return Text(shm::kStagingBuffers, " operations with a staging buffer are in flight, cluster version ",
                  self_.cluster_version);
    };
    if (waiting_.DeadlinePassed(flight, now)) {
      throw Error(KF_TIMEOUT,
                  Text(flight.Title(), "no staging buffer became free ", flight.deadline->Limit(), ", ", in_flight()));
    }
    flight.deadline->Tell(now, [&](double seconds) {
      return Text(flight.Title(), self_.control.PeerName(self_.rank), " has waited ", static_cast<int>(seconds),
                  " s for a staging buffer, ", in_flight());
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
  GiveBack(*staging_buffer);  // another rank has bound its buffer first
  return static_cast<uint32_t>(seen) - 1;
}

std::atomic<uint64_t>& StagingBuffers::InUse(Range range) const {
  shm::Header& header = self_.segment.header();
  return range.first == kPinned.first ? header.pinned_buffers : header.staging_buffers;
}

// Takes the free staging buffer with the lowest number, so that this rank can bind it. Returns none
// if all buffers are in use.
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

// Wakes the ranks that wait for a staging buffer. Call it after each change that may end their
// wait. The change must be a read-modify-write operation. A waiting rank sets its flag and then
// checks again for the change. So either this function sees the flag, or the rank sees the change.
void StagingBuffers::WakeWaiters() const {
  shm::Counter& waiters = self_.segment.header().staging_waiters;
  if ((waiters.value.load(std::memory_order_seq_cst) & shm::Counter::kSleeps) == 0) return;
  KUNGFU_FAULT_POINT("between a staging buffer's change and the wake-up");
  waiters.Stir();
}

// Each channel has two `left` counters, one for operations with even numbers and one for odd
// numbers. No rank begins the next operation with the same counter before all ranks have left this
// operation. If a rank fails before it leaves, the staging buffer stays bound until the cluster
// version ends.
void StagingBuffers::Leave(uint32_t channel, uint32_t sequence, size_t members, bool failed) const {
  const shm::Segment& segment = self_.segment;
  shm::ChannelHead& head = segment.channel(channel);
  std::atomic<uint32_t>& left = head.left[sequence & 1];
  if (left.fetch_add(1, std::memory_order_acq_rel) + 1 < members) return;
  KUNGFU_FAULT_POINT("as the last to leave");
  left.store(0, std::memory_order_relaxed);
  const uint64_t bound = head.staging_buffer[sequence & 1].load(std::memory_order_acquire);
  if (bound >> 32 != sequence) return;  // a mismatch occurred in operations that needed no staging buffer
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
