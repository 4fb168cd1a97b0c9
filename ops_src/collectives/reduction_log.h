// Records the generations in which this rank's reductions ended.
#ifndef KUNGFU_COLLECTIVES_REDUCTION_LOG_H_
#define KUNGFU_COLLECTIVES_REDUCTION_LOG_H_

#include <atomic>
#include <cstdint>

#include "collectives/operation.h"

namespace kungfu {

// This rank's reductions since the previous call of ReductionLog::Take. Each field except `commits`
// is a generation plus one, or 0 if there was no such reduction. A *commit* is a set of gradient
// reductions that all ended in the same generation (settle.h). A step may have several commits, for
// example if two optimizers run one after the other. `first` is less than `last` if a rank failed
// between two commits. The values are equal on all ranks that contributed to the last reduction.
struct Reductions {
  uint32_t gradient, any;         // the generation of the latest gradient reduction, and of the latest other all-reduce
  uint32_t commits, first, last;  // the number of commits, the generation of the first one, and of the last one
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
  // Records that a set of operations has ended in one generation. `operation` is one of them.
  void NoteCommit(const Operation& operation, uint32_t generation) {
    if (!operation.weighting.applies) return;
    commits_.fetch_add(1, std::memory_order_relaxed);
    uint32_t none = 0;
    first_commit_.compare_exchange_strong(none, generation + 1, std::memory_order_relaxed);
    last_commit_.store(generation + 1, std::memory_order_relaxed);
  }

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
  std::atomic<uint32_t> gradient_{0}, any_{0};  // `any_`: all-reduces that aren't gradient reductions
  std::atomic<uint32_t> commits_{0}, first_commit_{0}, last_commit_{0};
  std::atomic<uint32_t> last_generation_{0};
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_REDUCTION_LOG_H_
