// A counter in shared memory that one rank advances and other ranks wait for.
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

// Runs once per iteration of a busy-wait loop. It lets the core's other hardware thread run, and
// makes leaving the loop cheaper.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// A counter (modulo 2^30) that only a single writer advances. Its two highest bits are flags: a
// fence, and a mark that some thread is sleeping. All changes of the word are atomic
// read-modify-write operations, so all threads see them in the same order. Both invariants follow
// from this order.
//
// 1. No wake-up is lost. A waiting thread sets the sleep flag (Arm), then checks everything else
// that could end its wait, and then sleeps while the word equals the value that Arm returned, which
// includes the flag. The wait ends in one of two ways:
// - The writer advances the counter. This clears the flag. If the flag was set, the writer wakes
//   all sleepers. If the waiting thread isn't sleeping yet, the kernel finds that the word has
//   changed and returns immediately. If the flag was not set, Arm comes later, sets the flag in the
//   new value and returns this value.
// - Another thread changes another word (for example after a failure), and then calls Stir on this
//   word. If the flag was set, Stir clears it, and the rest is as in the first case. If it was not
//   set, Arm comes after Stir in the order of this word. Arm has acquire order, so the thread's last
//   check sees the change of the other word.
// Test: WithoutOne.SleepingRanksAreWoken
//
// Threads stay asleep only if a writer fails between its change and the wake-up. They then sleep
// until the writer is marked lost or their slice ends. Every sleep lasts at most one slice, and the
// thread then checks again.
//
// 2. A fenced counter never advances again. Advance and Fence change the same word, so one of them
// comes first. If Fence comes first, Advance returns false. The count before the fence stays
// readable.
// Test: WithoutOne.AnExpelledProcessLearnsItAndPublishesNothing
struct Counter {
  static constexpr uint32_t kFence = 0x80000000u;
  static constexpr uint32_t kSleeps = 0x40000000u;
  static constexpr uint32_t kMask = kSleeps - 1;  // mask of the count

  std::atomic<uint32_t> value;

  // Shifts the flags out. The sign of the difference modulo 2^30 then shows which value is ahead.
  static bool Reached(uint32_t value, uint32_t target) { return static_cast<int32_t>((value - target) << 2) >= 0; }
  bool Reached(uint32_t target) const { return Reached(value.load(std::memory_order_acquire), target); }
  // Returns the count. Only the writer may rely on it: for other threads it may be out of date. The
  // load is relaxed, so call Reached() before you read data that the count announces.
  uint32_t Count() const { return value.load(std::memory_order_relaxed) & kMask; }

  // Advances the counter to `next`. Only the writer may call this function. Returns false if the
  // counter is fenced. Then no rank sees the change, and the writer sees everything that was
  // written before the fence.
  [[nodiscard]] bool Advance(uint32_t next) {
    uint32_t seen = value.load(std::memory_order_acquire);
    do {
      if ((seen & kFence) != 0) return false;
      // The exchange fails only if a fence or a waiting thread's flag has changed the word since
      // the load.
    } while (!value.compare_exchange_weak(seen, next & kMask, std::memory_order_acq_rel, std::memory_order_acquire));
    if ((seen & kSleeps) != 0) {
      KUNGFU_FAULT_POINT("between a publish and its wake-up");
      WakeAll();
    }
    return true;
  }

  // Stops the counter at its current value forever.
  void Fence() {
    if ((value.fetch_or(kFence, std::memory_order_acq_rel) & kSleeps) != 0) Stir();
  }

  // Resets the counter to 0. Call it only while no other rank uses the counter. A fence stays set.
  void Clear() { value.fetch_and(kFence, std::memory_order_relaxed); }

  // Wakes all threads that sleep on this word, so that they check again.
  void Stir() {
    if ((value.fetch_and(~kSleeps, std::memory_order_acq_rel) & kSleeps) != 0) WakeAll();
  }
  void WakeAll() { syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

  // Sets the flag for a thread that is about to sleep. Returns the value to pass to Sleep. Between
  // the two calls, check the condition again.
  uint32_t Arm() { return value.fetch_or(kSleeps, std::memory_order_acq_rel) | kSleeps; }
  // Sleeps while the word equals `armed`, for at most `slice`.
  void Sleep(uint32_t armed, std::chrono::nanoseconds slice) {
    const timespec timeout{static_cast<time_t>(slice.count() / 1000000000),
                           static_cast<long>(slice.count() % 1000000000)};
    syscall(SYS_futex, &value, FUTEX_WAIT, armed, &timeout, nullptr, 0);
  }
};
static_assert(sizeof(Counter) == 4 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace kungfu::shm

#endif  // KUNGFU_TRANSPORT_SHM_FUTEX_H_
