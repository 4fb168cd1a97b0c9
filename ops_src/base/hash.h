// The one hash of the runtime where bytes are hashed.
#ifndef KUNGFU_BASE_HASH_H_
#define KUNGFU_BASE_HASH_H_

#include <cstddef>
#include <cstdint>

namespace kungfu {

// FNV-1a of 64 bits, whose basis and prime these are. A hash that is given is continued.
inline uint64_t Fnv1a(const void* data, size_t bytes, uint64_t hash = 0xcbf29ce484222325u) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ at[i]) * 0x100000001b3u;
  return hash;
}

}  // namespace kungfu

#endif  // KUNGFU_BASE_HASH_H_
