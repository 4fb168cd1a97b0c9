// What the collectives of this process have moved and how long they took, since it began. Costs a collective two reads
// of the processor's counter and a few relaxed additions: about 30 ns.
#ifndef KUNGFU_COLLECTIVES_TRAFFIC_H_
#define KUNGFU_COLLECTIVES_TRAFFIC_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/clock.h"
#include "transport/shm/segment.h"

namespace kungfu {

// All of it only grows; readers take differences.
struct TrafficTotals {
  uint64_t operations = 0;
  uint64_t brought_bytes = 0;
  double busy_s = 0;     // inside collectives, on whatever thread: moving data and waiting for the other ranks
  double exposed_s = 0;  // of that, while the program waited for it; the rest went on behind its back
  uint64_t received_from_each = 0;                                 // bytes read from every other rank
  std::array<uint64_t, shm::kMaxMembers> received_from_root = {};  // and from a rank alone
};

// Thread-safe.
class Traffic {
 public:
  static Traffic& Get();

  // A collective that began at `began` is done. What it has read from each other rank, or, with `root` not negative,
  // from that one.
  void Count(uint64_t began, uint64_t brought_bytes, uint64_t received_bytes, int root = -1) {
    busy_.fetch_add(Ticks() - began, std::memory_order_relaxed);
    operations_.fetch_add(1, std::memory_order_relaxed);
    brought_.fetch_add(brought_bytes, std::memory_order_relaxed);
    (root < 0 ? from_each_ : from_root_[static_cast<uint32_t>(root)])
        .fetch_add(received_bytes, std::memory_order_relaxed);
  }
  // A thread of ours ran operations from `began` until now, and the program didn't wait for it.
  void CountHidden(uint64_t began) { hidden_.fetch_add(Ticks() - began, std::memory_order_relaxed); }
  // The program waited for that thread from `began` until now.
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
