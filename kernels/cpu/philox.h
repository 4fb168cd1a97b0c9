// Philox4x32-10: computes random numbers from a counter and a key, independently of the worker and
// the time. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#ifndef KUNGFU_KERNELS_CPU_PHILOX_H_
#define KUNGFU_KERNELS_CPU_PHILOX_H_

#include <array>
#include <cstdint>

namespace mindspore::kernel::kungfu {

using PhiloxBlock = std::array<uint32_t, 4>;

inline PhiloxBlock Philox(PhiloxBlock x, uint64_t key) {
  auto low = static_cast<uint32_t>(key);
  auto high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * x[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * x[2];
    x = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ low, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ x[3] ^ high, static_cast<uint32_t>(a)};
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
  return x;
}

}  // namespace mindspore::kernel::kungfu

#endif  // KUNGFU_KERNELS_CPU_PHILOX_H_
