// The memory that operations of a transport work in.
#ifndef KUNGFU_COLLECTIVES_HOSTS_SCRATCH_H_
#define KUNGFU_COLLECTIVES_HOSTS_SCRATCH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "collectives/planes.h"

namespace kungfu::hosts {

// Of one operation at a time.
struct Scratch {
  size_t bytes() const { return contribution.bytes() + result.bytes() + other.bytes(); }

  Memory contribution, result, other;
  // What its ranks brought, as long as it may be needed again; here or in Contribution's staging buffer.
  char* data = nullptr;
  char* out = nullptr;     // the result, here or there
  uint64_t elements = 0;   // of that
  uint64_t signature = 0;  // of what they brought
  Planes planes;           // likewise
  size_t most = 0;         // bytes of the largest operation that it served
};

// Pages from the system cost more than the copies into them, so an operation takes the memory of an earlier one. Bounds
// what is kept: an operation takes memory that served one of about its size, or new memory, so that a small one holds
// no large memory while it runs; and what is idle is at most kMostIdle bytes, and what was used last. Thread-safe.
class ScratchPool {
 public:
  static constexpr size_t kMostIdle = 64 << 20;
  static constexpr size_t kSmall = 1 << 20;  // operations up to this size are about as large

  // For as long as it lives an operation of `bytes` has the memory.
  class Use {
   public:
    Use(ScratchPool& pool, size_t bytes) : pool_(pool), scratch_(pool.Take(bytes)) {}
    ~Use() { pool_.GiveBack(std::move(scratch_)); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    Scratch& operator*() const { return *scratch_; }

   private:
    ScratchPool& pool_;
    std::unique_ptr<Scratch> scratch_;
  };

  size_t idle_bytes() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return idle_bytes_;
  }

 private:
  using Entry = std::pair<std::unique_ptr<Scratch>, size_t>;  // and its bytes

  std::unique_ptr<Scratch> Take(size_t bytes) {
    std::unique_ptr<Scratch> taken;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      // The one that was used last, whose pages are still in the caches.
      const auto found = std::find_if(idle_.rbegin(), idle_.rend(), [&](const Entry& entry) {
        const size_t most = entry.first->most;
        return std::max(most, bytes) <= kSmall || (most >= bytes && most / 4 <= bytes);
      });
      if (found != idle_.rend()) {
        taken = std::move(found->first);
        idle_bytes_ -= found->second;
        idle_.erase(std::next(found).base());
      }
    }
    if (taken == nullptr) taken = std::make_unique<Scratch>();
    taken->most = std::max(taken->most, bytes);
    return taken;
  }

  void GiveBack(std::unique_ptr<Scratch> scratch) {
    std::vector<Entry> over;  // freed without the lock
    const std::lock_guard<std::mutex> guard(mutex_);
    const size_t bytes = scratch->bytes();
    idle_.emplace_back(std::move(scratch), bytes);
    idle_bytes_ += bytes;
    size_t n = 0;
    for (; idle_bytes_ > kMostIdle && n + 1 < idle_.size(); n++) idle_bytes_ -= idle_[n].second;
    const auto end = idle_.begin() + static_cast<std::ptrdiff_t>(n);
    over.assign(std::make_move_iterator(idle_.begin()), std::make_move_iterator(end));
    idle_.erase(idle_.begin(), end);
  }

  mutable std::mutex mutex_;
  std::vector<Entry> idle_;  // guarded by mutex_; the last was used last
  size_t idle_bytes_ = 0;    // guarded by mutex_
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_SCRATCH_H_
