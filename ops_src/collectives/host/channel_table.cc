#include "collectives/host/channel_table.h"

#include <algorithm>
#include <thread>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/hash.h"
#include "collectives/host/awaiting.h"

namespace kungfu::host {
namespace {

constexpr size_t kMaxBoundNames = shm::kChannels / 4;

// Never returns 0, because a key of 0 marks a free channel.
uint64_t HashOf(const std::string& key, uint32_t generation) {
  uint64_t hash = Fnv1a(&generation, sizeof generation, Fnv1a(key.data(), key.size()));
  hash ^= hash >> 32;
  return hash == 0 ? 1 : hash;
}

constexpr auto kLookEvery = std::chrono::milliseconds(1);

// The word that represents the lock. The lower 16 bits are the holder's rank plus one. The upper
// bits are the channel that the holder has declared, plus one. If the word is 0, the lock is free.
uint32_t LockWord(uint32_t rank, uint32_t declared) { return (rank + 1) | declared << 16; }
uint32_t HolderOf(uint32_t word) { return (word & 0xffff) - 1; }
uint32_t DeclaredBy(uint32_t word) { return word >> 16; }
static_assert(shm::kMaxRanks < 1u << 16 && shm::kChannels < 1u << 16);

bool IsRetired(const shm::Header& header, uint32_t channel) {
  return (header.retired[channel / 64].load(std::memory_order_relaxed) >> channel % 64 & 1) != 0;
}

}  // namespace

class ChannelTable::Lock {
 public:
  Lock(ChannelTable& table, const Operation& operation) : table_(table), operation_(operation), one_(table.binding_) {
    shm::Header& header = table_.segment_.header();
    auto looked = RunTime::Clock::now();
    RunTime waited(looked);
    Awaiting awaiting(table_.control_, table_.rank_);
    for (;;) {
      uint32_t seen = header.table_lock.load(std::memory_order_relaxed);
      const bool failed = seen != 0 && table_.control_.HasFailed(HolderOf(seen));
      // A failed holder may have declared a channel. After the compare-and-swap below has
      // succeeded, the declaration can't change any more. The lock word keeps the declaration until
      // the channel is retired, because this rank may fail before then.
      const uint32_t declared = DeclaredBy(seen);
      const uint32_t taken = LockWord(table_.rank_, declared);
      if (seen == 0 || failed) KUNGFU_FAULT_POINT("before it takes the lock of the table");
      if ((seen == 0 || failed) && header.table_lock.compare_exchange_strong(seen, taken, std::memory_order_seq_cst)) {
        word_ = taken;
        KUNGFU_FAULT_POINT("with the lock of the table");
        if (declared != 0) {
          header.retired[(declared - 1) / 64].fetch_or(uint64_t{1} << (declared - 1) % 64, std::memory_order_relaxed);
          KUNGFU_FAULT_POINT("when it has retired a channel");
          Must(Step(LockWord(table_.rank_, 0)));
        }
        return;
      }
      std::this_thread::yield();
      const auto now = RunTime::Clock::now();
      if (now - looked < kLookEvery) continue;
      table_.check_wait_(operation_, waited.Look(now));
      awaiting.NoteNoPeer();
      std::this_thread::sleep_for(std::chrono::microseconds(200));  // a running holder releases the lock within this
                                                                    // time
      looked = now;
    }
  }
  ~Lock() {
    if (word_ != 0) (void)Step(0);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // Declares a channel. A rank must declare a channel before it initializes the channel.
  void Declare(uint32_t channel) { Must(Step(LockWord(table_.rank_, channel + 1))); }
  void Release() { Must(Step(0)); }

 private:
  bool Step(uint32_t next) {
    uint32_t seen = word_;
    word_ = 0;
    if (!table_.segment_.header().table_lock.compare_exchange_strong(seen, next, std::memory_order_acq_rel))
      return false;
    word_ = next;
    return true;
  }
  // If the compare-and-swap failed, another rank has taken over the lock, because this rank is in
  // the list of failures. Then check_wait_ throws.
  void Must(bool stepped) {
    if (stepped) return;
    table_.check_wait_(operation_, RunTime::Clock::duration::zero());
    KUNGFU_CHECK(stepped, "rank ", table_.rank_, " has lost the lock of the channel table without being expelled");
  }

  ChannelTable& table_;
  const Operation& operation_;  // the operation whose name is being bound
  std::lock_guard<std::mutex> one_;
  uint32_t word_ = 0;  // the lock's word as this rank last wrote it; 0 if this rank doesn't hold the lock
};

ChannelTable::Use ChannelTable::Acquire(const Operation& operation) {
  const std::string key = KeyOf(operation);
  std::shared_ptr<BoundName> name;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = names_.find(key);
    if (found != names_.end()) {
      name = found->second;
    } else {
      if (names_.size() >= kMaxBoundNames) EvictOne();
      name = std::make_shared<BoundName>();
      Bind(operation, *name);
      names_.emplace(key, name);
    }
    name->last_used = ++clock_;
  }
  std::unique_lock<std::mutex> lock(name->busy);
  return {std::move(name), std::move(lock)};
}

void ChannelTable::MoveTo(uint32_t generation, const Operation& operation, BoundName& name) {
  const uint32_t before = name.channel;
  name.generation = generation;
  Bind(operation, name);
  KUNGFU_FAULT_POINT("before it gives a channel back");
  segment_.channel(before).ClearUser(rank_);
}

void ChannelTable::EvictOne() {
  auto oldest = names_.end();
  for (auto it = names_.begin(); it != names_.end(); ++it) {
    // Threads take references only under `mutex_`. So an entry to which only the map refers stays
    // idle while this thread holds `mutex_`.
    if (it->second.use_count() > 1) continue;
    if (oldest == names_.end() || it->second->last_used < oldest->second->last_used) oldest = it;
  }
  if (oldest == names_.end()) return;  // all names are in use; `Bind` reports an error if no channel is free
  segment_.channel(oldest->second->channel).ClearUser(rank_);
  names_.erase(oldest);
}

void ChannelTable::Bind(const Operation& operation, BoundName& name) {
  const uint64_t key = HashOf(KeyOf(operation), name.generation);
  Lock lock(*this, operation);
  uint32_t index = shm::kChannels, free = shm::kChannels;
  for (uint32_t i = 0; i < shm::kChannels && index == shm::kChannels; i++) {
    const shm::ChannelHead& head = segment_.channel(i);
    const bool bound = head.IsBound();
    if (bound && head.key.load(std::memory_order_relaxed) == key && !IsRetired(segment_.header(), i)) index = i;
    if (!bound && free == shm::kChannels && !IsRetired(segment_.header(), i)) free = i;
  }
  if (index == shm::kChannels) {
    if (free == shm::kChannels) {
      throw Error(KF_INVALID, Text("\"", operation.name, "\": at most ", shm::kChannels,
                                   " collectives with different names can run at the same time; wait for one first"));
    }
    index = free;
    KUNGFU_FAULT_POINT("before a channel is declared");
    lock.Declare(index);
    KUNGFU_FAULT_POINT("after a channel is declared");
    // No rank has bound this channel yet, so no rank reads these words.
    shm::ChannelHead& head = segment_.channel(index);
    for (uint32_t r = 0; r < segment_.size(); r++) {
      segment_.mailbox(index, r, 0).sequence.Clear();
      segment_.mailbox(index, r, 1).sequence.Clear();
      segment_.complaint(index, r).sequence.Clear();
    }
    for (int parity = 0; parity < 2; parity++) {
      head.left[parity].store(0, std::memory_order_relaxed);
      head.staging_buffer[parity].store(0, std::memory_order_relaxed);
    }
    KUNGFU_FAULT_POINT("before a channel has its key");
    head.key.store(key, std::memory_order_relaxed);
  }
  segment_.channel(index).SetUser(rank_);
  KUNGFU_FAULT_POINT("before the lock of the table is given back");
  lock.Release();
  const uint32_t even = segment_.mailbox(index, rank_, 0).sequence.Count();
  const uint32_t odd = segment_.mailbox(index, rank_, 1).sequence.Count();
  name.channel = index;
  name.sequence = shm::Counter::Reached(even, odd) ? even : odd;
}

}  // namespace kungfu::host
