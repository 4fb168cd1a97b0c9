// A waiting rank spins for a moment, and then sleeps until the awaited counter changes. The rank
// doesn't rely on a wake-up: each sleep ends after at most kSlice, and the rank then checks whether
// its wait can still succeed.
#include "collectives/host/waiting.h"

#include <sched.h>

#include <algorithm>
#include <optional>

#include "base/trace.h"

namespace kungfu::host {
namespace {

// About 50 us. A rank with its own core answers within this time. A rank that takes longer is
// probably waiting for a core, and a scheduler's time slice is longer than 50 us.
constexpr int kSpinTurns = 1000;
// If there are more ranks than cores, a spinning rank keeps the awaited rank from running. So a
// waiting rank yields its core instead. A yield takes about 0.4 us if no other thread wants the
// core, and up to a scheduler's time slice otherwise. So the limit is a time, not a number of
// yields.
constexpr auto kYieldTime = std::chrono::microseconds(50);
// A yield doesn't always give the core to another thread. If a thread has had less than its share
// of time, the scheduler keeps it running. So if a rank was woken late because another rank kept
// running, the woken rank's yields may have no effect during all of kYieldTime. (An operation of 64
// KiB with four ranks on two cores then takes 100 us instead of 40 us.) So the rank sleeps, which
// does give the core to another thread, if both conditions hold:
// - kVainTurns consecutive yields have returned immediately, which takes about 5 us;
// - a rank that has made less progress was last seen on this core.
constexpr int kVainTurns = 10;
constexpr auto kVainTurn = std::chrono::nanoseconds(1500);

// While this object lives, traces a wait for `peer`.
class TracedWait {
 public:
  TracedWait(const Endpoint& self, uint32_t peer)
      : self_(self), peer_(peer), began_ns_(Trace::On() ? Trace::Now() : 0) {}
  ~TracedWait() {
    if (began_ns_ == 0) return;
    Trace::AddWait(began_ns_, self_.control.IsWorker(peer_) ? self_.control.NumberOf(peer_) : Trace::kOtherHosts);
  }

 private:
  const Endpoint& self_;
  const uint32_t peer_;
  const uint64_t began_ns_;
};

}  // namespace

// Returns true if the counter has reached the target.
bool Waiting::Spin(const shm::Counter& counter, uint32_t target, uint32_t peer, const Flight& flight) const {
  if (flight.operation.part.patient) return false;
  // A transport's answer takes longer than a spin, because it needs other threads and the network. If
  // the transport or its rank spins, it keeps cores from these threads.
  if (!self_.control.IsWorker(peer) || !self_.control.IsWorker(self_.rank)) return false;
  if (!self_.oversubscribed) {
    for (int turn = 0; turn < kSpinTurns; turn++) {
      shm::Pause();
      if (counter.Reached(target)) return true;
    }
    return false;
  }
  using Clock = std::chrono::steady_clock;
  const int core = sched_getcpu();
  self_.segment.status(self_.rank).core.store(core, std::memory_order_relaxed);
  int vain_turns = 0;
  auto now = Clock::now();
  for (const auto end = now + kYieldTime; now < end;) {
    sched_yield();
    if (counter.Reached(target)) return true;
    const auto before = std::exchange(now, Clock::now());
    vain_turns = now - before < kVainTurn ? vain_turns + 1 : 0;
    if (vain_turns < kVainTurns) continue;
    if (HasLaggardOn(core, flight)) return false;
    vain_turns = 0;
  }
  return false;
}

void Waiting::AwaitSlowly(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight, bool or_failed) const {
  const TracedWait traced(self_, peer);
  if (Spin(counter, target, peer, flight)) return;
  Awaiting awaiting(self_.control, self_.rank);
  std::optional<DeadlockWatch::Wait> slow;
  for (int slices = 0;; slices++) {
    const uint32_t armed = counter.Arm();
    if (shm::Counter::Reached(armed, target)) return;
    // Arm has recorded that this rank is going to sleep (see Counter). The fence orders the checks
    // below relative to the writes of the thread that marks failed ranks (see
    // SegmentControlBlock::MarkLost).
    std::atomic_thread_fence(std::memory_order_seq_cst);
    rules_.ThrowIfPointless(counter, target, peer, flight);
    if (or_failed && rules_.HasFailed(peer)) return;
    const auto now = std::chrono::steady_clock::now();
    if (DeadlinePassed(flight, now)) {
      throw Error(KF_TIMEOUT, Text(flight.Title(), "no data from ", NameOf(peer, flight), " ", flight.deadline->Limit(),
                                   ", cluster version ", self_.cluster_version));
    }
    flight.deadline->Tell(now, [&](double seconds) {
      return Text(flight.Title(), self_.control.PeerName(self_.rank), " has waited ", static_cast<int>(seconds),
                  " s for ", Awaited(peer, flight), ", cluster version ", self_.cluster_version);
    });
    if (slices > 0) awaiting.Note(peer, flight.deadline->IsOverdue());
    if (slices == self_.options.watched_after) slow.emplace(deadlocks_, flight);
    counter.Sleep(armed, kSlice);
    if (counter.Reached(target)) return;
  }
}

// The awaited rank may itself be waiting for a busy rank, or for a decision that the launcher can't
// make while the store is unreachable. In these cases the deadline is extended.
bool Waiting::DeadlinePassed(Flight& flight, std::chrono::steady_clock::time_point now) const {
  if (!flight.deadline) flight.deadline.emplace(self_.options.collective_timeout, self_.options.tell_after);
  const bool busy = std::any_of(flight.members.begin(), flight.members.end(),
                                [&](uint32_t r) { return self_.control.IsBusy(r) && !rules_.HasFailed(r); });
  if (busy) flight.deadline->CountFrom(now);
  if (self_.control.deadlines_held()) flight.deadline->LeaveOut(now);
  const bool passed = flight.deadline->Passed(now);
  return passed && std::none_of(flight.members.begin(), flight.members.end(),
                                [&](uint32_t r) { return self_.control.IsEnding(r) && !rules_.HasFailed(r); });
}

std::string Waiting::NameOf(uint32_t peer, const Flight& flight) const {
  if (self_.control.IsWorker(peer) || !self_.options.behind_it) return self_.control.PeerName(peer);
  return self_.options.behind_it(flight.operation);
}

// Returns the names of `peer` and of all other ranks that haven't begun the operation yet.
std::string Waiting::Awaited(uint32_t peer, const Flight& flight) const {
  std::string awaited;
  for (const uint32_t r : flight.members) {
    const bool came = self_.segment.mailbox(flight.channel, r, flight.sequence).sequence.Reached(flight.sequence);
    if (r != peer && (came || r == self_.rank)) continue;
    awaited += Text(awaited.empty() ? "" : ", ", NameOf(r, flight));
    if (self_.control.IsBusy(r)) awaited += " (busy with long work that needs no other rank)";
    const std::string gave_up = self_.control.GaveUpAlone(r);
    if (!gave_up.empty()) awaited += Text(" (which gave up and will be killed: ", gave_up, ")");
  }
  return awaited;
}

// Returns true if another rank that was last seen on `core` has made less progress in this
// operation than this rank. A wrong answer is harmless, because it affects only how this rank
// waits.
bool Waiting::HasLaggardOn(int core, const Flight& flight) const {
  const shm::Segment& segment = self_.segment;
  const auto behind = [](const shm::Counter& its, const shm::Counter& own) { return !its.Reached(own.Count()); };
  return core >= 0 && std::any_of(flight.members.begin(), flight.members.end(), [&](uint32_t r) {
           if (r == self_.rank || segment.status(r).core.load(std::memory_order_relaxed) != core) return false;
           if (!segment.mailbox(flight.channel, r, flight.sequence).sequence.Reached(flight.sequence)) return true;
           const uint32_t staging_buffer = flight.staging_buffer;
           return flight.bound &&
                  (behind(segment.ready(staging_buffer, r), segment.ready(staging_buffer, self_.rank)) ||
                   behind(segment.reduced(staging_buffer, r), segment.reduced(staging_buffer, self_.rank)) ||
                   behind(segment.done(staging_buffer, r), segment.done(staging_buffer, self_.rank)));
         });
}

}  // namespace kungfu::host
