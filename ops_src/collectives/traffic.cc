#include "collectives/traffic.h"

#include <algorithm>

namespace kungfu {

Traffic& Traffic::Get() {
  static Traffic* const traffic = new Traffic;  // never destroyed, because threads may outlive static destructors
  return *traffic;
}

TrafficTotals Traffic::Read() const {
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const double ticks = static_cast<double>(Ticks() - first_tick_);
  const auto in_seconds = [&](uint64_t counted) {
    return ticks > 0 ? static_cast<double>(counted) * (seconds / ticks) : 0.0;
  };
  TrafficTotals totals;
  const uint64_t busy = busy_.load(std::memory_order_relaxed);
  const uint64_t hidden = std::min(busy, hidden_.load(std::memory_order_relaxed));
  totals.busy_s = in_seconds(busy);
  totals.exposed_s = in_seconds(busy - hidden + waited_.load(std::memory_order_relaxed));
  totals.operations = operations_.load(std::memory_order_relaxed);
  totals.brought_bytes = brought_.load(std::memory_order_relaxed);
  totals.received_from_each = from_each_.load(std::memory_order_relaxed);
  for (size_t r = 0; r < from_root_.size(); r++) {
    totals.received_from_root[r] = from_root_[r].load(std::memory_order_relaxed);
  }
  return totals;
}

}  // namespace kungfu
