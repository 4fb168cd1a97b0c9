#include "collectives/hosts/meter.h"

#include <algorithm>

namespace kungfu::hosts {
namespace {

constexpr size_t kLatest = 15, kEnough = 5;
constexpr uint64_t kFewBytes = 16 << 10;    // below this size, only the number of steps matters
constexpr uint64_t kManyBytes = 256 << 10;  // above this size, the number of steps hardly matters
constexpr uint64_t kMost = 1'000'000'000;

uint64_t Nanoseconds(std::chrono::nanoseconds time) {
  return static_cast<uint64_t>(std::max<int64_t>(time.count(), 1));
}

}  // namespace

bool Meter::Lately::Note(uint64_t measured) {
  measured = std::clamp<uint64_t>(measured, 1, kMost);
  if (last_.size() < kLatest) {
    last_.push_back(measured);
  } else {
    last_[next_++ % kLatest] = measured;
  }
  if (last_.size() < kEnough) return false;
  std::vector<uint64_t> sorted = last_;
  std::sort(sorted.begin(), sorted.end());
  const uint64_t median = sorted[sorted.size() / 2];
  if (told != 0 && median * 2 <= uint64_t{told} * 3 && median * 3 >= uint64_t{told} * 2) return false;
  told = static_cast<uint32_t>(median);
  return true;
}

void Meter::Begin(Clock::time_point now) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (under_way_++ == 0) {
    begin_ = now;
    most_ = ended_ = 0;
    failed_ = false;
    sum_ = {};
  }
  most_ = std::max(most_, under_way_);
}

void Meter::End(Clock::time_point now, const Cost* cost) {
  const std::lock_guard<std::mutex> guard(mutex_);
  under_way_--;
  ended_++;
  if (cost == nullptr) {
    failed_ = true;
  } else {
    sum_.steps += cost->steps;
    sum_.bytes += cost->bytes;
  }
  if (under_way_ == 0 && !failed_) Conclude(now - begin_);
}

void Meter::Conclude(std::chrono::nanoseconds took) {
  const uint64_t all = Nanoseconds(took);
  if (ended_ == 1 && sum_.steps > 0 && sum_.bytes <= kFewBytes) step_ns_.Note(all / sum_.steps);
  if (sum_.bytes < kManyBytes) return;
  const uint64_t waits = sum_.steps * step_ns_.told / most_;
  byte_ps_.Note(std::max(all - std::min(waits, all), all / 4) * 1000 / sum_.bytes);
  const tcp::Mesh::Cable cable = cable_();
  if (cable.bytes_per_ms == 0) return;
  if (cable_rate_.Note(cable.bytes_per_ms)) is_all_ = cable.is_all;
}

Figures Meter::figures() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return {step_ns_.told, byte_ps_.told, cable_rate_.told, is_all_ ? 1u : 0u};
}

}  // namespace kungfu::hosts
