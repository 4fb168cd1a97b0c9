// The hash function that the runtime uses for byte sequences.
#ifndef KUNGFU_BASE_HASH_H_
#define KUNGFU_BASE_HASH_H_

#include <cstddef>
#include <cstdint>

namespace kungfu {

// Computes 64-bit FNV-1a with its standard basis and prime. To hash more data into an earlier
// result, pass that result as `hash`.
inline uint64_t Fnv1a(const void* data, size_t bytes, uint64_t hash = 0xcbf29ce484222325u) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ at[i]) * 0x100000001b3u;
  return hash;
}

}  // namespace kungfu

#endif  // KUNGFU_BASE_HASH_H_
