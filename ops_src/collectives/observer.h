// An observer of this process's collectives. The collectives know no layer above them: monitoring installs itself here.
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
  // One operation under way; destroyed without Done if it fails.
  class Observation {
   public:
    virtual ~Observation() = default;
    // It has succeeded among `size` ranks, and its outputs are written.
    virtual void Done(uint32_t size) = 0;
  };

  virtual ~Observer() = default;
  // Before an operation, which may be in place. Null: of no interest. Called from any thread.
  virtual std::unique_ptr<Observation> Begin(const Operation& operation) = 0;

  // `observer` is never freed; null takes it away. One that is installed already may be called for a little longer.
  static void Install(Observer* observer) { installed_.store(observer, std::memory_order_release); }
  // What a communicator calls before each operation. Costs one load without an observer.
  static std::unique_ptr<Observation> Observe(const Operation& operation) {
    Observer* const observer = installed_.load(std::memory_order_acquire);
    return observer == nullptr ? nullptr : observer->Begin(operation);
  }

 private:
  static inline std::atomic<Observer*> installed_{nullptr};
};

// Operations that succeed or fail together.
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
