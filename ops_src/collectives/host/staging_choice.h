// Chooses how a rank stages chunks: with plain stores, or with streaming stores, which bypass the
// caches.
#ifndef KUNGFU_COLLECTIVES_HOST_STAGING_CHOICE_H_
#define KUNGFU_COLLECTIVES_HOST_STAGING_CHOICE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "collectives/operation.h"

namespace kungfu::host {

// After plain stores, a buffer is in the cache of the writer's core. A core that shares this cache
// reads the buffer quickly. Any other core must fetch modified lines from the writer's cache, which
// is slower than reading from memory. The table shows measurements with two ranks on two cores
// (float32 sum of 1 MiB / 64 MiB, in microseconds):
//
//     |                 | plain stores  | streaming stores |
//     | shared L3       | 150 / 10 400  | 185 / 15 700     |
//     | no shared cache | 526 / 36 900  | 132 / 13 700     |
//
// A program can't find out whether two cores share a cache: a virtual machine reports a shared L3
// even if the hypervisor moves its cores. So a rank tries both methods. A turn is an operation, or
// a part of a large operation (see StagingTurns). The first kTries turns of a history are tries, in
// which all ranks alternate between the methods in the same way. Later, four of every kSoon turns
// are tries, and still later four of every kPeriod turns. (If ranks run several operations at once,
// their turns might not match, which only makes the measurements less accurate.) In all other
// turns, each rank uses its faster method.
//
// Only tries are measured, because the time of any other turn also depends on the methods of the
// other ranks. There is one exception. Suppose that two consecutive turns both took more than twice
// as long as the last try of their method, or both took less than half as long. Then the time of
// these turns replaces the time of that try: the hypervisor has moved a core, or the try used new
// memory pages. The choice never changes the bits of the results.
//
// Thread-safe. A lost update costs only one measurement.
class StagingChoice {
 public:
  // Operations of the same kind and of similar size share a history. The number `history` must be
  // less than kHistories.
  static constexpr uint32_t kHistories = 6 * kNumKinds;

  struct Choice {
    bool streamed;
    bool is_try;
    bool is_again;  // true for a repeated try; the best try counts, because a rank may lose its core during a try
  };

  // Returns how to stage the next turn.
  Choice Next(uint32_t history) {
    History& past = histories_[history];
    const uint32_t turn = past.turns.fetch_add(1, std::memory_order_relaxed);
    // The first turn with each method touches the buffers' memory for the first time. So the first
    // turn costs many times as much as later turns, and isn't a try.
    if (turn < 2) return {turn == 1, false, false};
    if (turn < kTries) return {turn % 2 == 1, true, turn >= 4};
    const uint32_t since = turn % (turn < kPeriod ? kSoon : kPeriod);
    if (since < 4) return {turn % 2 == 1, true, since >= 2};
    return {past.streamed.load(std::memory_order_relaxed) < past.plain.load(std::memory_order_relaxed), false, false};
  }

  // Records the cost of a turn, in nanoseconds per byte.
  void Record(uint32_t history, Choice choice, float cost) {
    History& past = histories_[history];
    std::atomic<float>& known = choice.streamed ? past.streamed : past.plain;
    const float expected = known.load(std::memory_order_relaxed);
    if (choice.is_try) {
      known.store(choice.is_again && expected != 0 ? std::min(expected, cost) : cost, std::memory_order_relaxed);
      return;
    }
    if (expected == 0 || (cost < kSurprise * expected && cost * kSurprise > expected)) {
      past.surprises.store(0, std::memory_order_relaxed);
    } else if (past.surprises.fetch_add(1, std::memory_order_relaxed) + 1 >= kSurprises) {
      known.store(cost, std::memory_order_relaxed);
      past.surprises.store(0, std::memory_order_relaxed);
    }
  }

 private:
  static constexpr uint32_t kTries = 10;
  static constexpr uint32_t kSoon = 32;
  static constexpr uint32_t kPeriod = 128;
  static constexpr float kSurprise = 2;
  static constexpr uint32_t kSurprises = 2;

  struct History {
    std::atomic<uint32_t> turns{0};
    std::atomic<float> plain{0}, streamed{0};  // latest measurement of each method, in ns per byte
    std::atomic<uint32_t> surprises{0};        // number of consecutive turns with an unexpected cost
  };
  History histories_[kHistories];
};

// The turns of one operation that has several chunks. Each turn has kChunks chunks, and the last
// turn also has the remaining chunks. A rank stages less than one turn ahead of the chunks that it
// reads, so at most two turns are in progress. Tests pass their own `Clock`.
template <class Clock>
class StagingTurnsBy {
 public:
  static constexpr uint32_t kChunks = 16;

  StagingTurnsBy(StagingChoice& choice, uint32_t history, uint32_t chunks, size_t chunk_bytes, size_t bytes)
      : choice_(choice),
        history_(history),
        num_turns_(std::max(1u, chunks / kChunks)),
        chunk_bytes_(chunk_bytes),
        bytes_(bytes) {}

  // Returns true if `chunk` bypasses the caches when it is staged.
  bool Streams(uint32_t chunk) {
    const uint32_t turn = TurnOf(chunk);
    for (; num_begun_ <= turn; num_begun_++) turns_[num_begun_ % 2] = choice_.Next(history_);
    return turns_[turn % 2].streamed;
  }

  // The time between EndStaging and BeginReading doesn't count, because the rank may be waiting for
  // late ranks during that time.
  void BeginStaging() { since_ = Clock::now(); }
  void EndStaging() { staged_ = Clock::now(); }
  void BeginReading() { since_ += Clock::now() - staged_; }

  // Records that all chunks before `chunk` have been read.
  void HaveRead(uint32_t chunk) {
    const size_t bytes = std::min(chunk * chunk_bytes_, bytes_);
    const uint32_t turn = TurnOf(chunk - 1);
    if (bytes < bytes_ && TurnOf(chunk) == turn) return;
    (void)Streams(chunk - 1);  // a rank that contributes nothing hasn't called `Streams`, but its turns count too
    const auto now = Clock::now();
    const std::chrono::duration<float, std::nano> took = now - std::exchange(since_, now);
    choice_.Record(history_, turns_[turn % 2], took.count() / static_cast<float>(bytes - std::exchange(read_, bytes)));
  }

 private:
  uint32_t TurnOf(uint32_t chunk) const { return std::min(chunk / kChunks, num_turns_ - 1); }

  StagingChoice& choice_;
  const uint32_t history_;
  const uint32_t num_turns_;
  const size_t chunk_bytes_;
  const size_t bytes_;
  StagingChoice::Choice turns_[2]{};
  uint32_t num_begun_ = 0;
  size_t read_ = 0;  // number of bytes in finished turns
  typename Clock::time_point since_{}, staged_{};
};

using StagingTurns = StagingTurnsBy<std::chrono::steady_clock>;

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_STAGING_CHOICE_H_
