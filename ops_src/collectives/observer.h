// An observer of this process's collectives. The collectives don't depend on higher layers, so the
// monitoring layer installs its observer here.
#ifndef KUNGFU_COLLECTIVES_OBSERVER_H_
#define KUNGFU_COLLECTIVES_OBSERVER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/operation.h"

namespace kungfu {

class Observer {
 public:
  // One running operation. If the operation fails, the observation is destroyed without a call of
  // `Done`.
  class Observation {
   public:
    virtual ~Observation() = default;
    // Called when the operation has succeeded with `size` ranks and its outputs are written.
    virtual void Done(uint32_t size) = 0;
  };

  virtual ~Observer() = default;
  // Called before an operation, on any thread. The operation may be in place. Returns null if the
  // observer isn't interested in the operation.
  virtual std::unique_ptr<Observation> Begin(const Operation& operation) = 0;

  // Installs `observer`, which must never be freed. If `observer` is null, removes the current
  // observer. The previous observer may still be called for a short time.
  static void Install(Observer* observer) { installed_.store(observer, std::memory_order_release); }
  // A communicator calls this function before each operation. The call costs one load if no
  // observer is installed.
  static std::unique_ptr<Observation> Observe(const Operation& operation) {
    Observer* const observer = installed_.load(std::memory_order_acquire);
    return observer == nullptr ? nullptr : observer->Begin(operation);
  }

 private:
  static inline std::atomic<Observer*> installed_{nullptr};
};

// Observes several operations that succeed or fail together.
class ObservedTogether {
 public:
  ObservedTogether(const Operation* operations, size_t num_operations) {
    for (size_t k = 0; k < num_operations; k++) each_.push_back(Observer::Observe(operations[k]));
  }
  void Done(uint32_t size) const {
    for (const auto& one : each_) {
      if (one) one->Done(size);
    }
  }

 private:
  std::vector<std::unique_ptr<Observer::Observation>> each_;
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_OBSERVER_H_
