// Through the caches or past them: how a rank best hands chunks to the others.
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

// A buffer that was written with plain stores lies in its writer's cache. A core that shares a cache with the writer
// reads it from there at once; for one that doesn't, fetching modified lines from a foreign cache is slow, and memory
// is quicker. Measured with two ranks on two cores (float32 sum, 1 MiB / 64 MiB, microseconds):
//
//     |                 | plain stores  | streaming stores |
//     | shared L3       | 150 / 10 400  | 185 / 15 700     |
//     | no shared cache | 526 / 36 900  | 132 / 13 700     |
//
// Which of the two holds can't be asked: a virtual machine claims a shared L3 while its host moves its cores about. So
// it is tried out: the first kTries turns of a history, four in kSoon for a while and four in kPeriod later on, are
// staged in one way and the other, at all ranks alike (ranks that run several names at once may be out of step, which
// only blurs the samples); in between each rank stages as was quicker for it. A turn is an operation, or a part of a
// large one: see StagingTurns. Only the tries are samples, since what a turn takes depends on how the others stage,
// too; but for two in a row that took more than twice as long, or less than half as long, as what was chosen took when
// it was tried: the host has moved a core, or the try met fresh pages, and until the next one is long. The bits of the
// results don't depend on any of it.
//
// Thread-safe; a lost update costs nothing but a sample.
class StagingChoice {
 public:
  // Turns in operations of like size and kind have a history of their own; `history` is below kHistories.
  static constexpr uint32_t kHistories = 6 * kNumKinds;

  struct Choice {
    bool streamed;
    bool is_try;
    bool is_again;  // of several tries of the same the best counts: in the others a rank may have lost its core
  };

  // How the next turn is to be staged.
  Choice Next(uint32_t history) {
    History& past = histories_[history];
    const uint32_t turn = past.turns.fetch_add(1, std::memory_order_relaxed);
    // The first of each touch the buffers' memory for the first time, which costs many times what comes after.
    if (turn < 2) return {turn == 1, false, false};
    if (turn < kTries) return {turn % 2 == 1, true, turn >= 4};
    const uint32_t since = turn % (turn < kPeriod ? kSoon : kPeriod);
    if (since < 4) return {turn % 2 == 1, true, since >= 2};
    return {past.streamed.load(std::memory_order_relaxed) < past.plain.load(std::memory_order_relaxed), false, false};
  }

  // What a turn took, in nanoseconds a byte.
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
    std::atomic<float> plain{0}, streamed{0};  // the newest of each, ns a byte
    std::atomic<uint32_t> surprises{0};        // in a row
  };
  History histories_[kHistories];
};

// The turns of one operation that goes in chunks: each of kChunks chunks, and the last also takes what is left over. A
// rank stages less than a turn ahead of what it reads, so two turns at most are under way. Tests have a `Clock` of
// their own.
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

  // Whether `chunk` is staged past the caches.
  bool Streams(uint32_t chunk) {
    const uint32_t turn = TurnOf(chunk);
    for (; num_begun_ <= turn; num_begun_++) turns_[num_begun_ % 2] = choice_.Next(history_);
    return turns_[turn % 2].streamed;
  }

  // Time counts but for that between these two, in which it waits for ranks that may be late.
  void BeginStaging() { since_ = Clock::now(); }
  void EndStaging() { staged_ = Clock::now(); }
  void BeginReading() { since_ += Clock::now() - staged_; }

  // The chunks before `chunk` have been read.
  void HaveRead(uint32_t chunk) {
    const size_t bytes = std::min(chunk * chunk_bytes_, bytes_);
    const uint32_t turn = TurnOf(chunk - 1);
    if (bytes < bytes_ && TurnOf(chunk) == turn) return;
    (void)Streams(chunk - 1);  // a rank that brings nothing hasn't asked, but counts in the tries
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
  size_t read_ = 0;  // bytes, in turns that are over
  typename Clock::time_point since_{}, staged_{};
};

using StagingTurns = StagingTurnsBy<std::chrono::steady_clock>;

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_STAGING_CHOICE_H_
