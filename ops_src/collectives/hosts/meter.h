// Measures the network between the hosts while a transport uses the network.
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

// Measures the inter-host all-reduces whose algorithm AUTO has chosen, except those whose data
// travels in the headers (see invariant 13 in transport.h). A measurement begins when the hosts
// have exchanged their headers, so it includes no wait for a late rank.
//
// The time per step is measured with small all-reduces that ran alone. The time per byte is
// measured over a period between two moments at which no all-reduce is running, because concurrent
// all-reduces share the network interface.
//
// Each of these times is the median of the latest measurements. The reported value changes only if
// the median differs from it by more than a factor of 1.5. A new value may change the algorithm of
// an operation, and therefore the bits of the result. Only a lasting change of the network should
// have this effect.
//
// Thread-safe.
class Meter {
 public:
  using Clock = std::chrono::steady_clock;
  // `cable` measures this host's connections. The meter calls `cable` after many bytes have been
  // sent.
  explicit Meter(std::function<tcp::Mesh::Cable()> cable) : cable_(std::move(cable)) {}

  void Begin(Clock::time_point now);
  // Records that an all-reduce has ended. `cost` is the cost of the data that it sent, or null if
  // the all-reduce has failed.
  void End(Clock::time_point now, const Cost* cost);

  Figures figures() const;

 private:
  // The latest measurements of one quantity, and its reported value.
  class Lately {
   public:
    // Adds a measurement. Returns true if `told`, the reported value, has changed.
    bool Note(uint64_t measured);
    uint32_t told = 0;

   private:
    std::vector<uint64_t> last_;
    size_t next_ = 0;
  };

  void Conclude(std::chrono::nanoseconds took);

  const std::function<tcp::Mesh::Cable()> cable_;
  mutable std::mutex mutex_;
  // `mutex_` guards these members:
  Lately step_ns_, byte_ps_, cable_rate_;
  bool is_all_ = false;
  uint32_t under_way_ = 0;
  // These values cover the time since the last moment at which no all-reduce was running:
  Clock::time_point begin_;
  uint32_t most_ = 0, ended_ = 0;
  bool failed_ = false;
  Cost sum_{};
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_METER_H_
