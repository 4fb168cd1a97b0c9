// Which channel of the segment a name uses, from the view of one rank.
#ifndef KUNGFU_COLLECTIVES_CHANNEL_TABLE_H_
#define KUNGFU_COLLECTIVES_CHANNEL_TABLE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "transport/shm/segment.h"

namespace kungfu {

// One name of this rank. Held by one thread at a time; two threads under one name take turns.
struct Channel {
  std::mutex busy;
  // Guarded by `busy`, for the name's present generation:
  uint32_t index = 0;     // in the segment
  uint32_t sequence = 0;  // operations that this rank has begun under the name
  uint32_t generation = 0;
  uint64_t last_used = 0;  // guarded by the table
};

// Binds names to channels at first use. The k-th operation under a name matches the k-th of every other rank, in
// whatever order the names themselves come up at each rank.
//
// The table in shared memory changes only under its robust lock. An entry is one word (the key) plus the number of
// ranks that have it bound, so that a rank that dies with the lock leaves a table that is whole: at worst a channel
// that stays bound until the cluster version ends. A channel is freed when the last rank gives it back; until then each
// rank's post words keep its sequence, so that a rank may give a name back and bind it again while others are still at
// the same operation. A rank that is about to bind more names than a quarter of the channels first gives back the one
// it has not used for longest, hence programs may use any number of names as long as not all are in use at a time.
//
// A name has a channel in each generation (see communicator.cc) that it has come to. A rank that binds a name again
// begins with generation 0 and is led to the present one as it was the first time.
//
// Thread-safe.
class ChannelTable {
 public:
  ChannelTable(shm::Segment& segment, uint32_t rank) : segment_(segment), rank_(rank) {}

  // The channel for the next operation under `name`, locked for the calling thread. The caller advances `sequence`.
  struct Use {
    std::shared_ptr<Channel> channel;
    std::unique_lock<std::mutex> lock;
  };
  Use Acquire(const std::string& name);

  // On to a later generation of the name, with words of its own. The old ones stay as they are while anybody has to
  // read them. The caller holds `busy`.
  void MoveTo(uint32_t generation, const std::string& name, Channel& channel);

 private:
  void Bind(const std::string& name, Channel& channel);
  void Unbind(uint32_t channel);
  void EvictOne();  // mutex_ is held

  shm::Segment& segment_;
  const uint32_t rank_;
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Channel>> channels_;  // guarded by mutex_
  uint64_t clock_ = 0;                                                  // guarded by mutex_
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_CHANNEL_TABLE_H_
