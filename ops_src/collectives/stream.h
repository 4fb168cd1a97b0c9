// Writes results that are too large to stay in the caches.
#ifndef KUNGFU_COLLECTIVES_STREAM_H_
#define KUNGFU_COLLECTIVES_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kungfu {

// Copies data with stores that bypass the caches, so that other cached data stays there. The
// processor doesn't first read the target's cache lines, which saves a third of a plain copy's
// memory traffic. Call StreamFence() before you notify another thread of the data.
inline void StreamCopy(void* to, const void* from, size_t bytes) {
#if defined(__x86_64__)
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t head = (64 - (reinterpret_cast<uintptr_t>(out) & 63)) & 63;
  if (head >= bytes) {
    std::memcpy(out, in, bytes);
    return;
  }
  std::memcpy(out, in, head);
  size_t at = head;
  for (; at + 64 <= bytes; at += 64) {
    for (size_t part = 0; part < 64; part += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + at + part),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at + part)));
    }
  }
  std::memcpy(out + at, in + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

inline void StreamFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_STREAM_H_
