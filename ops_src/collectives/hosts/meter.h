// Measures the network between the hosts while a transport uses it.
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

// Measures all-reduces between hosts, if AUTO has chosen the algorithm. All-reduces whose data travels in the headers
// are excluded (transport.h, 13). A measurement begins when the headers of all hosts have been exchanged, so it
// includes no wait for a late rank.
//
// The time of a step comes from small all-reduces that ran alone. The time of a byte comes from all all-reduces between
// two moments at which none is running, because concurrent all-reduces share the cable.
//
// A figure is the median of the latest measurements. The value that is reported changes only when the median differs
// from it by half. A new value may change the algorithm of an operation, and with it the bits of the result. A short
// disturbance mustn't cause that, but a change of the network should.
//
// Thread-safe.
class Meter {
 public:
  using Clock = std::chrono::steady_clock;
  // `cable` is called after many bytes have been sent.
  explicit Meter(std::function<tcp::Mesh::Cable()> cable) : cable_(std::move(cable)) {}

  void Begin(Clock::time_point now);
  // Records that an all-reduce has ended. `cost` is the cost of what it sent, or null if it has failed.
  void End(Clock::time_point now, const Cost* cost);

  Figures figures() const;

 private:
  // The latest measurements, and the value that is reported for them.
  class Lately {
   public:
    // Adds a measurement. Returns whether `told` has changed.
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
  // Since the last moment at which no all-reduce was running:
  Clock::time_point begin_;
  uint32_t most_ = 0, ended_ = 0;
  bool failed_ = false;
  Cost sum_{};
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_METER_H_
