// Squared norms of the gradients that this rank brings to a reduction and of what comes out: all that the gradient
// noise scale needs. Taken where the gradients pass anyway, so that no graph has to be built for it.
#ifndef KUNGFU_MONITORING_GRADIENT_NORMS_H_
#define KUNGFU_MONITORING_GRADIENT_NORMS_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "kungfu/c_api.h"

namespace kungfu {

struct Operation;

namespace monitoring {

struct Norms {
  double brought = 0;  // squared norm of this rank's gradients
  double reduced = 0;  // squared norm of their mean over the ranks, whether that or the sum was asked for
  uint64_t elements = 0;
  double cpu_s = 0;  // of this thread, spent on the above
};

// Thread-safe. While nothing is watched it costs a collective one load.
class GradientNorms {
 public:
  static GradientNorms& Get();

  // From now on: all-reduces (sum or mean of floats) whose name has `name` between its slashes: "gradients",
  // "gradients/0", "adaptive/gradients/0". Empty: none.
  void Watch(const std::string& name);
  // What was seen since the last call, or since Watch.
  Norms Take();

  // Around one operation.
  class Scope {
   public:
    explicit Scope(const Operation& operation) {
      if (Get().watching_.load(std::memory_order_relaxed)) Begin(operation);
    }
    // The operation has succeeded among `size` ranks.
    void Done(uint32_t size) {
      if (operation_ != nullptr) End(size);
    }

   private:
    void Begin(const Operation& operation);
    void End(uint32_t size);

    const Operation* operation_ = nullptr;  // null: not watched
    Norms norms_;
  };

 private:
  GradientNorms() = default;
  bool Matches(const Operation& operation);

  std::atomic<bool> watching_{false};
  std::mutex mutex_;
  std::string name_;  // guarded by mutex_
  Norms sums_;        // guarded by mutex_
};

// Sum of the squares of `count` elements. Float32 lanes over blocks, then float64: relative error below 1e-6. The same
// bits for the same elements.
double SquaredNorm(const void* data, uint64_t count, kf_dtype dtype);

}  // namespace monitoring
}  // namespace kungfu

#endif  // KUNGFU_MONITORING_GRADIENT_NORMS_H_
