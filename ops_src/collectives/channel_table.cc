#include "collectives/channel_table.h"

#include <cerrno>

#include "runtime/error.h"

namespace kungfu {
namespace {

constexpr size_t kMaxBoundNames = shm::kChannels / 4;

// FNV-1a with a final mix; 0 marks a free channel.
uint64_t KeyOf(const std::string& name, uint32_t generation) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char c : name) hash = (hash ^ c) * 0x100000001b3u;
  hash = (hash ^ (generation + 256)) * 0x100000001b3u;
  hash ^= hash >> 32;
  return hash == 0 ? 1 : hash;
}

class TableLock {
 public:
  explicit TableLock(pthread_mutex_t& mutex) : mutex_(mutex) {
    const int result = pthread_mutex_lock(&mutex_);
    // Its holder died. Each step of a change leaves the table whole, so there is nothing to repair.
    if (result == EOWNERDEAD) pthread_mutex_consistent(&mutex_);
    KUNGFU_CHECK(result == 0 || result == EOWNERDEAD, "locking the table of names gave ", result);
  }
  ~TableLock() { pthread_mutex_unlock(&mutex_); }
  TableLock(const TableLock&) = delete;
  TableLock& operator=(const TableLock&) = delete;

 private:
  pthread_mutex_t& mutex_;
};

}  // namespace

ChannelTable::Use ChannelTable::Acquire(const std::string& name) {
  std::shared_ptr<Channel> channel;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = channels_.find(name);
    if (found != channels_.end()) {
      channel = found->second;
    } else {
      if (channels_.size() >= kMaxBoundNames) EvictOne();
      channel = std::make_shared<Channel>();
      Bind(name, *channel);
      channels_.emplace(name, channel);
    }
    channel->last_used = ++clock_;
  }
  std::unique_lock<std::mutex> lock(channel->busy);
  return {std::move(channel), std::move(lock)};
}

void ChannelTable::MoveTo(uint32_t generation, const std::string& name, Channel& channel) {
  const uint32_t before = channel.index;
  channel.generation = generation;
  Bind(name, channel);
  Unbind(before);
}

void ChannelTable::EvictOne() {
  auto oldest = channels_.end();
  for (auto it = channels_.begin(); it != channels_.end(); ++it) {
    // A thread takes its reference under mutex_, so an entry that only the map refers to is idle and stays so.
    if (it->second.use_count() > 1) continue;
    if (oldest == channels_.end() || it->second->last_used < oldest->second->last_used) oldest = it;
  }
  if (oldest == channels_.end()) return;  // all in flight; Bind says whether there is room
  Unbind(oldest->second->index);
  channels_.erase(oldest);
}

void ChannelTable::Bind(const std::string& name, Channel& channel) {
  const uint64_t key = KeyOf(name, channel.generation);
  TableLock lock(segment_.header().table_lock);
  uint32_t index = shm::kChannels;
  for (uint32_t i = 0; i < shm::kChannels; i++) {
    const uint64_t seen = segment_.channel(i).key.load(std::memory_order_relaxed);
    if (seen == key) {
      index = i;
      break;
    }
    if (seen == 0 && index == shm::kChannels) index = i;
  }
  if (index == shm::kChannels) {
    throw Error(KF_INVALID, Text("more than ", shm::kChannels, " collective names are in flight at a time; \"", name,
                                 "\" finds no room"));
  }
  shm::ChannelHead& head = segment_.channel(index);
  if (head.key.load(std::memory_order_relaxed) == 0) {
    // Nobody has it bound, so nobody looks at these words.
    for (uint32_t r = 0; r < segment_.size(); r++) {
      segment_.post(index, r, 0).sequence.Clear();
      segment_.post(index, r, 1).sequence.Clear();
      segment_.complaint(index, r).sequence.Clear();
    }
    for (int parity = 0; parity < 2; parity++) {
      head.left[parity].store(0, std::memory_order_relaxed);
      head.lane[parity].store(0, std::memory_order_relaxed);
    }
    head.bound = 0;
    head.key.store(key, std::memory_order_relaxed);
  }
  head.bound++;
  const uint32_t even = segment_.post(index, rank_, 0).sequence.Count();
  const uint32_t odd = segment_.post(index, rank_, 1).sequence.Count();
  channel.index = index;
  channel.sequence = shm::Counter::Reached(even, odd) ? even : odd;
}

void ChannelTable::Unbind(uint32_t channel) {
  TableLock lock(segment_.header().table_lock);
  shm::ChannelHead& head = segment_.channel(channel);
  if (--head.bound == 0) head.key.store(0, std::memory_order_relaxed);
}

}  // namespace kungfu
