// Measures the squared norm of this rank's gradients before a reduction, and of the reduced
// gradients. The gradient noise scale needs only these norms. Because they are measured inside the
// reduction, no graph has to be built for them.
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
  double reduced = 0;  // squared norm of the mean of all ranks' gradients, even if the reduction computes a sum
  uint64_t elements = 0;
  double cpu_s = 0;  // CPU time that this thread has spent on these measurements
};

// Thread-safe. While a name is watched, this object is installed as the observer of collectives.
class GradientNorms : public Observer {
 public:
  static GradientNorms& Get();

  // Starts to watch all-reduces that compute a sum or mean of floats, and whose name, split at
  // slashes, contains `name`. For example, `gradients` matches "gradients", "gradients/0" and
  // "adaptive/gradients/0". If `name` is empty, no all-reduce is watched.
  void Watch(const std::string& name);
  // Returns the sums since the last call of `Take` or `Watch`.
  Norms Take();
  // `Watching` and `Add` are for sharded steps (shards/step.h). A sharded step consists of several
  // operations, and no operation contains the gradients of a whole rank. So if `Watching` returns
  // true, the step measures the norms itself and passes them to `Add`. The `brought` norm is then
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

// Returns the sum of the squares of `count` elements. Each block is summed in float32, in several
// partial sums. The blocks' sums are added in float64. The relative error is below 1e-6. Equal
// elements give bitwise equal results.
double SquaredNorm(const void* data, uint64_t count, kf_dtype dtype);
// Returns the CPU time that this thread has used, in seconds.
double ThreadCpuSeconds();

}  // namespace kungfu::monitoring

#endif  // KUNGFU_MONITORING_GRADIENT_NORMS_H_
