// In which generations this rank's reductions have ended.
#ifndef KUNGFU_COLLECTIVES_REDUCTION_LOG_H_
#define KUNGFU_COLLECTIVES_REDUCTION_LOG_H_

#include <atomic>
#include <cstdint>

#include "collectives/operation.h"

namespace kungfu {

// What came of the reductions since the last call, in generations plus one; 0: there was none. Operations of one mind
// are one commit. A step may have several (two optimizers, one after the other), and a rank may fail between them, when
// the first update is done: `first` is less than `last` then. The same answer at all ranks that contributed to the
// last.
struct Reductions {
  uint32_t gradient, any;         // the latest of the gradients', and of all all-reduces
  uint32_t commits, first, last;  // of gradients
};

// Thread-safe.
class ReductionLog {
 public:
  void Note(const Operation& operation, uint32_t generation) {
    if (operation.kind != Kind::kAllReduce) return;
    last_generation_.store(generation, std::memory_order_relaxed);
    std::atomic<uint32_t>& latest = operation.weighting.applies ? gradient_ : any_;
    uint32_t seen = latest.load(std::memory_order_relaxed);
    while (seen < generation + 1 && !latest.compare_exchange_weak(seen, generation + 1, std::memory_order_relaxed)) {
    }
  }
  // Operations of one mind have ended, `operation` among them.
  void NoteCommit(const Operation& operation, uint32_t generation) {
    if (!operation.weighting.applies) return;
    commits_.fetch_add(1, std::memory_order_relaxed);
    uint32_t none = 0;
    first_commit_.compare_exchange_strong(none, generation + 1, std::memory_order_relaxed);
    last_commit_.store(generation + 1, std::memory_order_relaxed);
  }

  // Operations of one mind, of which this is the first, have settled.
  void NoteSettled(const Operation& first, uint32_t generation) {
    Note(first, generation);
    NoteCommit(first, generation);
  }

  Reductions Take() {
    const auto take = [](std::atomic<uint32_t>& word) { return word.exchange(0, std::memory_order_relaxed); };
    return {take(gradient_), take(any_), take(commits_), take(first_commit_), take(last_commit_)};
  }
  uint32_t last_generation() const { return last_generation_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint32_t> gradient_{0}, any_{0};  // `any_`: of those that are no gradients'
  std::atomic<uint32_t> commits_{0}, first_commit_{0}, last_commit_{0};
  std::atomic<uint32_t> last_generation_{0};
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_REDUCTION_LOG_H_
