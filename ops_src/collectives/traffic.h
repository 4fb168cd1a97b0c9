// Counts the bytes that this process's collectives have transferred, and the time that they took.
// Counting takes about 30 ns per collective.
#ifndef KUNGFU_COLLECTIVES_TRAFFIC_H_
#define KUNGFU_COLLECTIVES_TRAFFIC_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/clock.h"
#include "transport/shm/segment.h"

namespace kungfu {

// All values only grow. To measure an interval, subtract two readings.
struct TrafficTotals {
  uint64_t operations = 0;
  uint64_t brought_bytes = 0;
  double busy_s = 0;                // time that threads spent in collectives: moving data, and waiting for other
                                    // ranks
  double exposed_s = 0;             // the part of `busy_s` during which the program waited; the rest ran in the
                                    // background
  uint64_t received_from_each = 0;  // number of bytes read from every other rank
  // For each rank, the number of bytes in collectives that read only from it.
  std::array<uint64_t, shm::kMaxMembers> received_from_root = {};
};

// Thread-safe.
class Traffic {
 public:
  static Traffic& Get();

  // Counts a collective that began at `began` and has just ended. The collective has read
  // `received_bytes` bytes from every other rank, or only from rank `root` if `root` isn't
  // negative.
  void Count(uint64_t began, uint64_t brought_bytes, uint64_t received_bytes, int root = -1) {
    busy_.fetch_add(Ticks() - began, std::memory_order_relaxed);
    operations_.fetch_add(1, std::memory_order_relaxed);
    brought_.fetch_add(brought_bytes, std::memory_order_relaxed);
    (root < 0 ? from_each_ : from_root_[static_cast<uint32_t>(root)])
        .fetch_add(received_bytes, std::memory_order_relaxed);
  }
  // Counts the time since `began` as overlapped time: a background thread of this library ran
  // operations, and the program didn't wait for them.
  void CountHidden(uint64_t began) { hidden_.fetch_add(Ticks() - began, std::memory_order_relaxed); }
  // Counts the time since `began`, during which the program waited for the background thread.
  void CountWait(uint64_t began) { waited_.fetch_add(Ticks() - began, std::memory_order_relaxed); }

  uint64_t operations() const { return operations_.load(std::memory_order_relaxed); }
  TrafficTotals Read() const;

 private:
  Traffic() = default;

  const uint64_t first_tick_ = Ticks();
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  alignas(64) std::atomic<uint64_t> busy_{0};
  std::atomic<uint64_t> hidden_{0}, waited_{0}, operations_{0}, brought_{0}, from_each_{0};
  std::array<std::atomic<uint64_t>, shm::kMaxMembers> from_root_ = {};
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_TRAFFIC_H_
