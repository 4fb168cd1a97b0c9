// A waiter spins for a moment, then sleeps on the word that it waits for. No waiter relies on being woken: each sleep
// ends by itself after kSlice, and it looks whether the wait has become pointless.
#include "collectives/host/waiting.h"

#include <sched.h>

#include <algorithm>
#include <optional>

namespace kungfu::host {
namespace {

// About 50 us: longer than a rank that has a core of its own needs to answer, shorter than a scheduler's turn.
constexpr int kSpinTurns = 1000;
// With more ranks than cores, a rank that spins keeps the awaited one from running, so it yields the core instead. A
// turn takes about 0.4 us if no other thread wants the core, and a scheduler's turn if many do: hence no number.
constexpr auto kYieldTime = std::chrono::microseconds(50);
// A yield needn't pass the core on: the scheduler keeps a thread that it owes time. A rank that was woken late, after a
// rank that ran on, is owed some, and would then turn in vain through all of kYieldTime in operation after operation
// (64 KiB with four ranks on two cores: 100 us instead of 40). So many turns in a row that came back at once, about 5
// us, while a rank that is behind was last seen on this core: then it sleeps, which does pass the core on.
constexpr int kVainTurns = 10;
constexpr auto kVainTurn = std::chrono::nanoseconds(1500);

}  // namespace

// Whether the word was reached meanwhile.
bool Waiting::Spin(const shm::Counter& counter, uint32_t target, const Flight& flight) const {
  if (flight.operation.part.patient) return false;
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
  if (Spin(counter, target, flight)) return;
  Awaiting awaiting(self_.control, self_.rank);
  std::optional<DeadlockWatch::Wait> slow;
  for (int slices = 0;; slices++) {
    const uint32_t armed = counter.Arm();
    if (shm::Counter::Reached(armed, target)) return;
    // After it has said that it sleeps (see Counter), and in one order with the thread that marks failed ranks: see
    // SegmentControlBlock::MarkLost.
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

// A missing rank may itself wait for a busy one, or for what the launcher can't say without the store.
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

// `peer`, and the other ranks that haven't even come.
std::string Waiting::Awaited(uint32_t peer, const Flight& flight) const {
  std::string awaited;
  for (const uint32_t r : flight.members) {
    const bool came = self_.segment.mailbox(flight.channel, r, flight.sequence).sequence.Reached(flight.sequence);
    if (r != peer && (came || r == self_.rank)) continue;
    awaited += Text(awaited.empty() ? "" : ", ", NameOf(r, flight));
    if (self_.control.IsBusy(r)) awaited += " (which does something long alone)";
    const std::string gave_up = self_.control.GaveUpAlone(r);
    if (!gave_up.empty()) awaited += Text(" (which is out and will be ended: ", gave_up, ")");
  }
  return awaited;
}

// Whether some rank that was last seen on `core`, where this one runs, has published less in this operation than this
// one. A guess that may be late or wrong: it decides only how to wait.
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
