// Through the caches or past them: how a rank best hands chunks to the others.
#ifndef KUNGFU_COLLECTIVES_STAGING_CHOICE_H_
#define KUNGFU_COLLECTIVES_STAGING_CHOICE_H_

#include <algorithm>
#include <atomic>
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
// it is tried out: the first kTries operations of a history, and four in kPeriod later on, are staged in one way and
// the other, at all ranks alike (ranks that run several names at once may be out of step, which only blurs the
// samples); in between each rank stages as was quicker for it. Only the tries are samples, since what an operation
// takes depends on how the others stage, too; but for two in a row that took more than twice as long as what was chosen
// took when it was tried: the host has moved a core, and until the next try is long. The bits of the results don't
// depend on any of it.
//
// Thread-safe; a lost update costs nothing but a sample.
class StagingChoice {
 public:
  // Operations of like size and kind have a history of their own; `history` is below kHistories.
  static constexpr uint32_t kHistories = 32;

  struct Choice {
    bool streamed;
    bool is_try;
    bool is_again;  // of several tries of the same the best counts: in the others somebody may have lost its core
  };

  // How the next operation is to be staged.
  Choice Next(uint32_t history) {
    History& past = histories_[history];
    const uint32_t turn = past.turns.fetch_add(1, std::memory_order_relaxed);
    // The first of each touch the slots' memory for the first time, which costs many times what comes after.
    if (turn < 2) return {turn == 1, false, false};
    if (turn < kTries) return {turn % 2 == 1, true, turn >= 4};
    if (turn % kPeriod < 4) return {turn % 2 == 1, true, turn % kPeriod >= 2};
    return {past.streamed.load(std::memory_order_relaxed) < past.plain.load(std::memory_order_relaxed), false, false};
  }

  // What an operation took, in nanoseconds a byte.
  void Record(uint32_t history, Choice choice, float cost) {
    History& past = histories_[history];
    std::atomic<float>& known = choice.streamed ? past.streamed : past.plain;
    const float expected = known.load(std::memory_order_relaxed);
    if (choice.is_try) {
      known.store(choice.is_again && expected != 0 ? std::min(expected, cost) : cost, std::memory_order_relaxed);
      return;
    }
    if (expected == 0 || cost < kSurprise * expected) {
      past.surprises.store(0, std::memory_order_relaxed);
    } else if (past.surprises.fetch_add(1, std::memory_order_relaxed) + 1 >= kSurprises) {
      known.store(cost, std::memory_order_relaxed);
      past.surprises.store(0, std::memory_order_relaxed);
    }
  }

 private:
  static constexpr uint32_t kTries = 10;
  static constexpr uint32_t kPeriod = 128;
  static constexpr float kSurprise = 2;
  static constexpr uint32_t kSurprises = 2;

  struct History {
    std::atomic<uint32_t> turns{0};
    std::atomic<float> plain{0}, streamed{0};  // the newest of each, ns a byte
    std::atomic<uint32_t> surprises{0};        // in a row
  };
  History histories_[kHistories];
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_STAGING_CHOICE_H_
