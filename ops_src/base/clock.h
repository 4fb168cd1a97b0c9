// A clock that is cheap enough to be read at the start and end of every collective.
#ifndef KUNGFU_BASE_CLOCK_H_
#define KUNGFU_BASE_CLOCK_H_

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace kungfu {

// Returns the ticks of a counter that runs at a constant rate. Reading std::chrono's clock would
// take longer than everything else that a measurement does.
inline uint64_t Ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

}  // namespace kungfu

#endif  // KUNGFU_BASE_CLOCK_H_
