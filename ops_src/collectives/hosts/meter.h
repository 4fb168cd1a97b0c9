// What a transport measures of the hosts' network while it is used.
#ifndef KUNGFU_COLLECTIVES_HOSTS_METER_H_
#define KUNGFU_COLLECTIVES_HOSTS_METER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "collectives/hosts/selector.h"
#include "transport/tcp/mesh.h"

namespace kungfu::hosts {

// Times the all-reduces between hosts that AUTO has chosen an algorithm for, but for those that go with the hosts'
// words (transport.h, 13). They begin when all hosts have met, so no late rank is in what they take. A step's time is
// that of small ones that were alone, a byte's that of all between a moment with nothing under way and the next one:
// those that go side by side share the cable.
//
// A figure is the median of what was measured lately. What is told of it changes only when it is off by half: the
// algorithm of an operation, and with that its bits, shall not change with each disturbance, but when the network has
// changed.
//
// Thread-safe.
class Meter {
 public:
  using Clock = std::chrono::steady_clock;
  // `cable` is asked when many bytes have been sent.
  explicit Meter(std::function<tcp::Mesh::Cable()> cable) : cable_(std::move(cable)) {}

  void Begin(Clock::time_point now);
  // One that began has ended; `cost`: what it sent, null if it has failed.
  void End(Clock::time_point now, const Cost* cost);

  Figures figures() const;

 private:
  // The latest of what was measured, and what is told of it.
  class Lately {
   public:
    // Whether `told` has changed.
    bool Note(uint64_t measured);
    uint32_t told = 0;

   private:
    std::vector<uint64_t> last_;
    size_t next_ = 0;
  };

  void Conclude(std::chrono::nanoseconds took);

  const std::function<tcp::Mesh::Cable()> cable_;
  mutable std::mutex mutex_;
  // All guarded by mutex_:
  Lately step_ns_, byte_ps_, cable_rate_;
  bool is_all_ = false;
  uint32_t under_way_ = 0;
  // Since nothing was under way:
  Clock::time_point begin_;
  uint32_t most_ = 0, ended_ = 0;
  bool failed_ = false;
  Cost sum_{};
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_METER_H_
