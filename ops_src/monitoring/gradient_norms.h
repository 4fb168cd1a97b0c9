// Squared norms of the gradients that this rank brings to a reduction and of what comes out: all that the gradient
// noise scale needs. Taken where the gradients pass anyway, so that no graph has to be built for it.
#ifndef KUNGFU_MONITORING_GRADIENT_NORMS_H_
#define KUNGFU_MONITORING_GRADIENT_NORMS_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "collectives/observer.h"

namespace kungfu::monitoring {

struct Norms {
  double brought = 0;  // squared norm of this rank's gradients
  double reduced = 0;  // squared norm of their mean over the ranks, whether that or the sum was asked for
  uint64_t elements = 0;
  double cpu_s = 0;  // of this thread, spent on the above
};

// Thread-safe. Installed as the collectives' observer while something is watched.
class GradientNorms : public Observer {
 public:
  static GradientNorms& Get();

  // From now on: all-reduces (sum or mean of floats) whose name has `name` between its slashes: "gradients",
  // "gradients/0", "adaptive/gradients/0". Empty: none.
  void Watch(const std::string& name);
  // What was seen since the last call, or since Watch.
  Norms Take();
  // A step of shards (shards/step.h) is several operations of which none has a rank's gradients, and measures itself:
  // if something is watched, it adds what it has seen. `brought` is then the mean over the shards.
  bool Watching() const;
  void Add(const Norms& norms);

  std::unique_ptr<Observation> Begin(const Operation& operation) override;

 private:
  class Measured;

  GradientNorms() = default;
  bool Matches(const Operation& operation);

  mutable std::mutex mutex_;
  std::string name_;  // guarded by mutex_
  Norms sums_;        // guarded by mutex_
};

// Sum of the squares of `count` elements. Float32 lanes over blocks, then float64: relative error below 1e-6. The same
// bits for the same elements.
double SquaredNorm(const void* data, uint64_t count, kf_dtype dtype);
// That this thread has used.
double ThreadCpuSeconds();

}  // namespace kungfu::monitoring

#endif  // KUNGFU_MONITORING_GRADIENT_NORMS_H_
