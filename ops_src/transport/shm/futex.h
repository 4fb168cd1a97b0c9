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

namespace kungfu::shm {

// One busy-wait turn: lets the other hardware thread run and lowers the cost of leaving the loop.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// A counter with one writer that only grows (modulo 2^31), a fence in its highest bit, and the flag by which sleepers
// ask to be woken. All live in one cache line, which the writer owns except for that flag.
//
// No wake-up is lost: the writer stores the value and then reads `sleepers`, a waiter stores `sleepers` and then reads
// the value, all sequentially consistent, so that at least one of them sees the other. A waiter that read the old value
// just before the store is turned back by the kernel, which compares again. A writer that dies between store and
// wake-up leaves sleepers asleep for one slice: every sleep has an end, after which the waiter looks around.
//
// A fenced counter never advances again: Advance and Fence change the same word by compare-and-swap and fetch-or, so
// exactly one of them comes first, and a writer that came second learns it. What was counted before stays readable.
struct Counter {
  static constexpr uint32_t kFence = 0x80000000u;

  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;

  // The fence is shifted out, and the sign of the difference modulo 2^31 tells which is ahead.
  static bool Reached(uint32_t value, uint32_t target) { return static_cast<int32_t>((value - target) << 1) >= 0; }
  bool Reached(uint32_t target) const { return Reached(value.load(std::memory_order_acquire), target); }
  uint32_t Count() const { return value.load(std::memory_order_relaxed) & ~kFence; }

  // The writer's step to `next`. False if it has been fenced: nobody sees the step then.
  [[nodiscard]] bool Advance(uint32_t next) {
    uint32_t seen = value.load(std::memory_order_relaxed);
    // As dear as a sequentially consistent store. Fails only when the fence came in between.
    if ((seen & kFence) != 0 ||
        !value.compare_exchange_strong(seen, next & ~kFence, std::memory_order_seq_cst, std::memory_order_relaxed)) {
      return false;
    }
    Wake();
    return true;
  }

  // From now on the counter stays where it is.
  void Fence() {
    value.fetch_or(kFence, std::memory_order_seq_cst);
    Wake();
  }

  // Back to 0, while nobody else looks at it. A fence stays.
  void Clear() { value.fetch_and(kFence, std::memory_order_relaxed); }

  void Wake() {
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
      sleepers.store(0, std::memory_order_relaxed);
      syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  // Sleeps until the value may have changed from what is not yet `target` or somebody calls Wake, at most for `slice`.
  void Sleep(uint32_t target, std::chrono::nanoseconds slice) {
    sleepers.store(1, std::memory_order_seq_cst);
    const uint32_t seen = value.load(std::memory_order_seq_cst);
    if (Reached(seen, target)) return;
    const timespec timeout{static_cast<time_t>(slice.count() / 1000000000),
                           static_cast<long>(slice.count() % 1000000000)};
    syscall(SYS_futex, &value, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  }
};
static_assert(sizeof(Counter) == 8 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace kungfu::shm

#endif  // KUNGFU_TRANSPORT_SHM_FUTEX_H_
