// Sets a thread's rounding and treatment of denormals to IEEE 754's defaults.
#ifndef KUNGFU_BASE_FLOAT_ENVIRONMENT_H_
#define KUNGFU_BASE_FLOAT_ENVIRONMENT_H_

#include <cfenv>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kungfu {

// Sets whether this thread flushes denormals, that is, treats denormal inputs as zero and replaces
// denormal results by zero. Returns the previous setting.
inline bool FlushDenormals(bool flushes) {
#if defined(__x86_64__)
  constexpr uint32_t kBits = 0x8040;  // one bit for inputs and one for results
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(flushes ? before | kBits : before & ~kBits);
  return (before & kBits) == kBits;
#elif defined(__aarch64__)
  constexpr uint64_t kBit = uint64_t{1} << 24;
  uint64_t before;
  asm volatile("mrs %0, fpcr" : "=r"(before));
  asm volatile("msr fpcr, %0" : : "r"(flushes ? before | kBit : before & ~kBit));
  return (before & kBit) != 0;
#else
  return flushes;
#endif
}

// Sets IEEE 754's default environment while the object lives. Without it, results could depend on
// the thread, because only some of a framework's threads may flush denormals to zero.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&before_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_FLOAT_ENVIRONMENT_H_
