// The working memory of a transport's operations.
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

// Working memory that serves one operation at a time.
struct Scratch {
  size_t bytes() const { return contribution.bytes() + result.bytes() + other.bytes(); }

  Memory contribution, result, other;
  // The contribution of the host's ranks. While it may be needed again, it is kept in
  // `contribution` or in the pinned staging buffer.
  char* data = nullptr;
  char* out = nullptr;     // the result, in memory of this object or in the pinned staging buffer
  uint64_t elements = 0;   // number of elements in the result
  uint64_t signature = 0;  // signature of the contribution
  Planes planes;           // planes of the contribution
  size_t most = 0;         // number of bytes of the largest operation that has used this memory
};

// Keeps the memory of earlier operations for reuse, because new pages cost more than the copies
// into them. Thread-safe. The pool limits the memory that it keeps:
// - An operation gets either new memory, or memory that an operation of about the same size has
//   used. So a small operation never holds large memory while it runs.
// - At most kMostIdle bytes stay idle. The exception is the memory that was used last, which is
//   always kept.
class ScratchPool {
 public:
  static constexpr size_t kMostIdle = 64 << 20;
  static constexpr size_t kSmall = 1 << 20;  // operations up to this size count as equally large

  // Assigns memory to an operation of `bytes` bytes while this object lives.
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
  using Entry = std::pair<std::unique_ptr<Scratch>, size_t>;  // (memory, its number of bytes)

  std::unique_ptr<Scratch> Take(size_t bytes) {
    std::unique_ptr<Scratch> taken;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      // Take the memory that was used last, because its pages are still in the caches.
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
    std::vector<Entry> over;  // freed after the lock is released
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
  std::vector<Entry> idle_;  // guarded by mutex_; in the order of last use
  size_t idle_bytes_ = 0;    // guarded by mutex_
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_SCRATCH_H_
