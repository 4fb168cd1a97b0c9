// Measures the squared norms of this rank's gradients before a reduction and of the reduced gradients. The gradient
// noise scale needs only these norms. They are measured inside the reduction, so no graph has to be built for them.
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
  double reduced = 0;  // squared norm of the mean of all ranks' gradients, even if the reduction was a sum
  uint64_t elements = 0;
  double cpu_s = 0;  // CPU time of this thread for these measurements
};

// Thread-safe. Installed as the collectives' observer while a name is watched.
class GradientNorms : public Observer {
 public:
  static GradientNorms& Get();

  // Starts to watch all-reduces (sum or mean of floats) whose name, split at slashes, contains `name`: "gradients",
  // "gradients/0", "adaptive/gradients/0". If `name` is empty, nothing is watched.
  void Watch(const std::string& name);
  // Returns the sums since the last call, or since Watch.
  Norms Take();
  // For steps of shards (shards/step.h). Such a step consists of several operations, and none of them has a rank's
  // gradients. So the step measures itself and passes its norms to Add if Watching() returns true. Their `brought` is
  // the mean over the shards.
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

// Returns the sum of the squares of `count` elements. It adds in float32 lanes within blocks, then in float64. The
// relative error is below 1e-6. Equal elements give equal bits.
double SquaredNorm(const void* data, uint64_t count, kf_dtype dtype);
// Returns the CPU time that this thread has used.
double ThreadCpuSeconds();

}  // namespace kungfu::monitoring

#endif  // KUNGFU_MONITORING_GRADIENT_NORMS_H_
