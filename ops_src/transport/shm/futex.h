// A word in shared memory that one rank advances and others wait for.
#ifndef KUNGFU_TRANSPORT_SHM_FUTEX_H_
#define KUNGFU_TRANSPORT_SHM_FUTEX_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#include "base/fault_point.h"

namespace kungfu::shm {

// One busy-wait turn: lets the other hardware thread run and lowers the cost of leaving the loop.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// A counter with one writer that only grows (modulo 2^30), with two flags in its highest bits: a
// fence, and a mark that some thread sleeps. All changes of the word are atomic read-modify-writes,
// so they have one order, from which both invariants follow.
//
// 1. No wake-up is lost. A waiter sets the flag (Arm), then looks at whatever else could end its
// wait, then sleeps on the word *with* the flag. What it waits for changes in one of two ways:
// - The writer steps on: its step takes the flag away and returns whether it was there. If it was,
//   the writer wakes. A waiter that doesn't sleep yet finds the word changed, and the kernel turns
//   it back. If it wasn't, the waiter sets it in the new value, which Arm returns.
// - Another thread changes another word (a failure, say), then Stirs this one. If the flag was
//   there, Stir takes it away, and the same follows. If not, Arm comes after Stir in the order of
//   the word. Hence it sees, acquiring, what was written before, and the waiter's last look finds
//   that.
// Test: WithoutOne.SleepingRanksAreWoken
//
// Only a writer that fails between its step and the wake-up leaves sleepers asleep: until it is
// marked lost, or for one slice. Every sleep has an end, after which the waiter looks again.
//
// 2. A fenced counter never advances again: Advance and Fence change the same word, so exactly one
// of them comes first, and a writer that came second learns so. What was counted before stays
// readable.
// Test: WithoutOne.AnExpelledProcessLearnsItAndPublishesNothing
struct Counter {
  static constexpr uint32_t kFence = 0x80000000u;
  static constexpr uint32_t kSleeps = 0x40000000u;
  static constexpr uint32_t kMask = kSleeps - 1;  // of the count

  std::atomic<uint32_t> value;

  // The flags are shifted out, and the sign of the difference modulo 2^30 tells which is ahead.
  static bool Reached(uint32_t value, uint32_t target) { return static_cast<int32_t>((value - target) << 2) >= 0; }
  bool Reached(uint32_t target) const { return Reached(value.load(std::memory_order_acquire), target); }
  // Of the writer's own, or as a hint: nothing that it announces may be read after it.
  uint32_t Count() const { return value.load(std::memory_order_relaxed) & kMask; }

  // The writer's step to `next`. False if it has been fenced: no rank sees the step then, and the writer sees what was
  // written before the fence.
  [[nodiscard]] bool Advance(uint32_t next) {
    uint32_t seen = value.load(std::memory_order_acquire);
    do {
      if ((seen & kFence) != 0) return false;
      // Fails only when the fence, or a waiter's flag, came in between.
    } while (!value.compare_exchange_weak(seen, next & kMask, std::memory_order_acq_rel, std::memory_order_acquire));
    if ((seen & kSleeps) != 0) {
      KUNGFU_FAULT_POINT("between a publish and its wake-up");
      WakeAll();
    }
    return true;
  }

  // From now on the counter stays where it is.
  void Fence() {
    if ((value.fetch_or(kFence, std::memory_order_acq_rel) & kSleeps) != 0) Stir();
  }

  // Back to 0, while no other rank looks at it. A fence stays.
  void Clear() { value.fetch_and(kFence, std::memory_order_relaxed); }

  // Wakes all that sleep on this word, to look again.
  void Stir() {
    if ((value.fetch_and(~kSleeps, std::memory_order_acq_rel) & kSleeps) != 0) WakeAll();
  }
  void WakeAll() { syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

  // Sets the flag of a waiter that is about to sleep; returns what to sleep on, after a last look.
  uint32_t Arm() { return value.fetch_or(kSleeps, std::memory_order_acq_rel) | kSleeps; }
  // Sleeps while the word is `armed`, at most for `slice`.
  void Sleep(uint32_t armed, std::chrono::nanoseconds slice) {
    const timespec timeout{static_cast<time_t>(slice.count() / 1000000000),
                           static_cast<long>(slice.count() % 1000000000)};
    syscall(SYS_futex, &value, FUTEX_WAIT, armed, &timeout, nullptr, 0);
  }
};
static_assert(sizeof(Counter) == 4 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace kungfu::shm

#endif  // KUNGFU_TRANSPORT_SHM_FUTEX_H_
