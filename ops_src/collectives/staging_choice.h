// Through the caches or past them: how a rank best hands chunks to the others.
#ifndef KUNGFU_COLLECTIVES_STAGING_CHOICE_H_
#define KUNGFU_COLLECTIVES_STAGING_CHOICE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kungfu {

// A slot that was written with plain stores lies in its writer's cache. A core that shares a cache with the writer
// reads it from there at once; for one that doesn't, fetching modified lines from a foreign cache is slow, and memory
// is quicker. Measured with two ranks on two cores (float32 sum, 1 MiB / 64 MiB, microseconds):
//
//     |                 | plain stores  | streaming stores |
//     | shared L3       | 150 / 10 400  | 185 / 15 700     |
//     | no shared cache | 526 / 36 900  | 132 / 13 700     |
//
// Which of the two holds can't be asked: a virtual machine claims a shared L3 while its host moves its cores about. So
// it is tried out: the first two operations of a history, and two in kPeriod later on, are staged in one way and the
// other at all ranks (ranks that run several names at once may be out of step, which only blurs the samples); in
// between each rank stages as was quicker for it. The bits of the results don't depend on it.
//
// Thread-safe; a lost update costs nothing but a sample.
class StagingChoice {
 public:
  // Operations of like size and kind have a history of their own; `history` is below kHistories.
  static constexpr uint32_t kHistories = 32;

  bool Streamed(uint32_t history, uint32_t sequence) const {
    const float plain = cost_[history][0].load(std::memory_order_relaxed);
    const float streamed = cost_[history][1].load(std::memory_order_relaxed);
    if (plain == 0 || streamed == 0) return plain != 0;
    const uint32_t turn = sequence % kPeriod;
    if (turn < 2) return turn == 1;
    return streamed < plain;
  }

  void Record(uint32_t history, bool streamed, float ns_per_byte) {
    std::atomic<float>& cost = cost_[history][streamed ? 1 : 0];
    const float before = cost.load(std::memory_order_relaxed);
    cost.store(before == 0 ? ns_per_byte : before + kWeight * (ns_per_byte - before), std::memory_order_relaxed);
  }

 private:
  static constexpr uint32_t kPeriod = 64;
  static constexpr float kWeight = 0.5F;  // of the newest sample

  std::atomic<float> cost_[kHistories][2] = {};  // 0: not tried yet
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_STAGING_CHOICE_H_
