#include "transport/shm/segment_control_block.h"

#include <optional>

#include "base/error.h"
#include "base/fault_point.h"

namespace kungfu::shm {
namespace {

// Reads the clock that all processes on a host share.
std::chrono::nanoseconds Now() { return std::chrono::steady_clock::now().time_since_epoch(); }

// Calls visit(word) with each word that `rank` uses to publish data. If `used_only` is false, this
// includes words that aren't in use yet, because a channel or staging buffer may be bound at any
// moment.
template <typename Visit>
void EachWordOf(const Segment& segment, uint32_t rank, bool used_only, const Visit& visit) {
  // Visit this word first. An error that follows from the fence of another word must not make the
  // other ranks give up.
  visit(segment.status(rank).gave_up);
  if (segment.is_control_block()) return;
  for (uint32_t c = 0; c < kChannels; c++) {
    if (used_only && !segment.channel(c).IsBound()) continue;
    visit(segment.mailbox(c, rank, 0).sequence);
    visit(segment.mailbox(c, rank, 1).sequence);
    visit(segment.complaint(c, rank).sequence);
  }
  const uint64_t staging_buffers = segment.header().staging_buffers.load(std::memory_order_acquire);
  const uint64_t pinned_buffers = segment.header().pinned_buffers.load(std::memory_order_acquire);
  for (uint32_t l = 0; l < kStagingBuffers + kPinnedBuffers; l++) {
    const uint64_t used = l < kStagingBuffers ? staging_buffers >> l : pinned_buffers >> (l - kStagingBuffers);
    if (used_only && (used & 1) == 0) continue;
    visit(segment.ready(l, rank));
    visit(segment.reduced(l, rank));
    visit(segment.done(l, rank));
  }
}

}  // namespace

// First fences the words that `rank` uses to publish data, so that they never change again. Then
// adds the rank to the list of failures. Finally wakes all sleeping ranks. So a survivor that finds
// the rank in the list sees the last values of these words.
void SegmentControlBlock::MarkLost(uint32_t rank, const std::string& reason, bool recover, bool reaped) {
  if (rank >= size()) throw Error(KF_INVALID, Text("there is no rank ", rank, " in a cluster of ", size()));
  if (recover && header().recovers == 0)
    throw Error(KF_INVALID, "can't recover from a failure: the segment was created with recovers=false");
  RankStatus& lost = segment_->status(rank);
  if (!lost.state.Reached(static_cast<uint32_t>(RankState::kLost))) {
    CopyText(lost.lost_reason, reason);
    if (recover) EachWordOf(*segment_, rank, /*used_only=*/false, [](Counter& word) { word.Fence(); });
    lost.state.value.exchange(static_cast<uint32_t>(RankState::kLost) | Counter::kFence, std::memory_order_acq_rel);
    lost.state.WakeAll();
    if (recover) {
      const uint32_t num_failed = header().num_failed.load(std::memory_order_relaxed);
      header().failure_order[num_failed] = static_cast<uint16_t>(rank);
      header().num_failed.store(num_failed + 1, std::memory_order_seq_cst);
    } else {
      header().lost.fetch_add(1);
    }
    // The fence comes before this thread checks which words are in use. A rank that binds a word
    // after this check reads the list of failures after it has bound the word (ChannelHead::SetUser).
    std::atomic_thread_fence(std::memory_order_seq_cst);
    // Ranks that wait for a survivor must check again too, because the survivor may repeat the
    // operation.
    for (uint32_t r = 0; r < size(); r++) {
      EachWordOf(*segment_, r, /*used_only=*/true, [](Counter& word) { word.Stir(); });
    }
    // The rank may have failed between a change and the wake-up, so wake the ranks that wait for it
    // here.
    EachWordOf(*segment_, rank, /*used_only=*/true, [](Counter& word) { word.WakeAll(); });
    header().staging_waiters.Stir();
  }
  if (!reaped || segment_->is_control_block()) return;
  for (uint32_t c = 0; c < kChannels; c++) {
    if ((segment_->channel(c).users[rank / 64].load(std::memory_order_relaxed) >> rank % 64 & 1) != 0)
      segment_->channel(c).ClearUser(rank);
  }
}

// A state becomes kLost before it is known whether the members can continue. During that time, the
// ranks in state kLost outnumber the entries in the list of failures plus `lost`.
bool SegmentControlBlock::EndedForAll(uint32_t rank) const {
  uint32_t unlisted = 0;
  for (uint32_t r = 0; r < size(); r++) unlisted += State(r) == RankState::kLost && !HasFailed(r);
  return State(rank) == RankState::kLost && !HasFailed(rank) &&
         unlisted <= header().lost.load(std::memory_order_acquire);
}

bool SegmentControlBlock::Attach(uint32_t rank, const std::string& address, bool has_state) {
  RankStatus& mine = segment_->status(rank);
  if (mine.state.Count() != static_cast<uint32_t>(RankState::kAbsent)) return false;
  mine.has_state = has_state ? 1 : 0;
  CopyText(mine.address, address);
  // If this fails, the rank has been fenced, and its State is kLost.
  (void)mine.state.Advance(static_cast<uint32_t>(RankState::kAttached));
  return true;
}

std::string SegmentControlBlock::Address(uint32_t rank) const { return TextOf(segment_->status(rank).address); }

std::string SegmentControlBlock::PeerName(uint32_t rank) const {
  if (!IsWorker(rank)) return "the other hosts";
  const std::string address = Address(rank);
  const uint32_t number = NumberOf(rank);
  return address.empty() ? Text("rank ", number) : Text("rank ", number, " (", address, ")");
}

// If the rank is already marked lost, nothing changes, because no rank needs this word any more.
void SegmentControlBlock::Leave(uint32_t rank) {
  Counter& state = segment_->status(rank).state;
  const auto left = static_cast<uint32_t>(RankState::kLeft);
  if (!state.Reached(left)) (void)state.Advance(left);
}

// The load has acquire order, so a reader of kLeft sees what the rank published before it left.
RankState SegmentControlBlock::State(uint32_t rank) const {
  const uint32_t word = segment_->status(rank).state.value.load(std::memory_order_acquire);
  return static_cast<RankState>(word & Counter::kMask);
}

uint32_t SegmentControlBlock::Heartbeat(uint32_t rank) const {
  return State(rank) >= RankState::kLeft ? 0 : segment_->status(rank).heartbeat.load();
}

void SegmentControlBlock::NoteStep(uint32_t rank, uint64_t step, std::chrono::nanoseconds each) {
  RankStatus& mine = segment_->status(rank);
  mine.step.store(step, std::memory_order_relaxed);
  mine.step_ns.store(static_cast<uint64_t>(each.count()), std::memory_order_relaxed);
  mine.stepped_ns.store(static_cast<uint64_t>(Now().count()), std::memory_order_release);
}

void SegmentControlBlock::NoteActivity(uint32_t rank, uint32_t activity) {
  RankStatus& mine = segment_->status(rank);
  mine.activity.store(activity, std::memory_order_relaxed);
  mine.activity_ns.store(static_cast<uint64_t>(Now().count()), std::memory_order_release);
}

std::optional<SegmentControlBlock::Awaited> SegmentControlBlock::AwaitedBy(uint32_t rank) const {
  const uint32_t word = segment_->status(rank).awaits.load(std::memory_order_relaxed);
  if (word == 0) return std::nullopt;
  return Awaited{(word & ~kOverdue) - 1, (word & kOverdue) != 0};
}

std::optional<SegmentControlBlock::Progress> SegmentControlBlock::ProgressOf(uint32_t rank) const {
  if (rank >= size()) throw Error(KF_INVALID, Text("there is no rank ", rank, " in a cluster of ", size()));
  const RankStatus& its = segment_->status(rank);
  const std::chrono::nanoseconds told(its.stepped_ns.load(std::memory_order_acquire));
  if (told.count() == 0) return std::nullopt;
  return Progress{its.step.load(std::memory_order_relaxed),
                  std::chrono::nanoseconds(its.step_ns.load(std::memory_order_relaxed)), Now() - told};
}

SegmentControlBlock::Activity SegmentControlBlock::ActivityOf(uint32_t rank) const {
  if (rank >= size()) throw Error(KF_INVALID, Text("there is no rank ", rank, " in a cluster of ", size()));
  const RankStatus& its = segment_->status(rank);
  const std::chrono::nanoseconds began(its.activity_ns.load(std::memory_order_acquire));
  Activity found{its.activity.load(std::memory_order_relaxed), Now() - began, ""};
  if (began.count() == 0) found.ago = std::chrono::nanoseconds(0);
  const WaitReport& report = its.wait_report;
  const uint64_t version = report.version.load(std::memory_order_acquire);
  if ((version & 1) != 0 || report.num_waits.load(std::memory_order_relaxed) == 0) return found;
  uint64_t words[WaitReport::kTextWords + 1] = {};
  for (size_t i = 0; i < WaitReport::kTextWords; i++) words[i] = report.text[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (report.version.load(std::memory_order_relaxed) == version)
    found.operations = reinterpret_cast<const char*>(words);
  return found;
}

// Writes the error before the word that announces the error. The flag in the header makes the other
// ranks check this word.
void SegmentControlBlock::GiveUp(uint32_t rank, GaveUp how, kf_status status, const std::string& text) {
  RankStatus& mine = segment_->status(rank);
  mine.gave_up_status = status;
  CopyText(mine.gave_up_text, text);
  KUNGFU_FAULT_POINT("before it gives up");
  header().gave_up.store(1, std::memory_order_release);
  (void)mine.gave_up.Advance(static_cast<uint32_t>(how));
}

std::string SegmentControlBlock::GaveUpAlone(uint32_t rank) const {
  const RankStatus& its = segment_->status(rank);
  const uint32_t word = its.gave_up.value.load(std::memory_order_acquire) & Counter::kMask;
  if (word != static_cast<uint32_t>(GaveUp::kAlone)) return "";
  return TextOf(its.gave_up_text);
}

// Ignores failed ranks. If another rank saw the error before the failed rank was marked, that other
// rank has called GiveUp with the same error.
std::optional<Error> SegmentControlBlock::GaveUpForAll() const {
  if (header().gave_up.load(std::memory_order_acquire) == 0) return std::nullopt;
  for (uint32_t r = 0; r < size(); r++) {
    const RankStatus& its = segment_->status(r);
    if (!its.gave_up.Reached(static_cast<uint32_t>(GaveUp::kForAll)) || HasFailed(r)) continue;
    return Error(static_cast<kf_status>(its.gave_up_status), TextOf(its.gave_up_text));
  }
  return std::nullopt;
}

// The word only grows, so the result doesn't depend on which rank raises it.
void SegmentControlBlock::RequestSyncPoint(uint64_t number) {
  std::atomic<uint64_t>& called = header().sync_points;
  uint64_t seen = called.load(std::memory_order_relaxed);
  while (seen < number && !called.compare_exchange_weak(seen, number, std::memory_order_acq_rel)) {
  }
}

}  // namespace kungfu::shm
