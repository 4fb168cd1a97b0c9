// Assigns the segment's channels to the names of operations. Each rank has its own table.
#ifndef KUNGFU_COLLECTIVES_HOST_CHANNEL_TABLE_H_
#define KUNGFU_COLLECTIVES_HOST_CHANNEL_TABLE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/run_time.h"
#include "collectives/operation.h"
#include "transport/shm/segment.h"
#include "transport/shm/segment_control_block.h"

namespace kungfu::host {

// A name that this rank has bound to a channel. Only one thread at a time uses the name.
struct BoundName {
  std::mutex busy;
  // `busy` guards these members. They are valid for the name's current generation:
  uint32_t channel = 0;   // number of the channel in the segment
  uint32_t sequence = 0;  // number of operations with this name that this rank has begun
  uint32_t generation = 0;
  uint64_t last_used = 0;  // guarded by the table's mutex_
};

// Binds a name to a channel when the name is first used. The k-th operation with a name matches the
// k-th operation with that name on every other rank. Ranks may use new names in any order.
//
// A channel is bound, and its key is valid, while the channel contains the bit of at least one
// rank. Each rank's mailboxes keep their sequence numbers until the last rank has released the
// channel. So a rank may release a name and bind it again while other ranks are still in the same
// operation. A rank that has bound a quarter of the channels releases its least recently used name
// before it binds another name. So a program may use any number of names, if few of them are in use
// at the same time.
// Test: Names.MoreThanTheTableHoldsOverTime
//
// Two ranks must not bind one name to two channels, or two names to one channel. So names are bound
// under a lock. The lock is one word, which contains the holder's rank and the channel that the
// holder is about to initialize. A rank releases a channel without the lock, because it clears only
// its own bit.
// Test: WithoutOne.TwoNeverHaveTheTable
//
// The holder of the lock may fail at any instruction. The holder may also be expelled while its
// process still exists, and the process may continue at any later time:
// - The holder changes the lock only by compare-and-swap from the value that it wrote last. If the
//   holder is in the list of failures, another rank takes over the lock. From then on, every
//   compare-and-swap by the old holder fails. (The old holder can't acquire the lock again with the
//   same word, because only one thread of a process requests the lock at a time.)
// - While a rank holds the lock, it makes plain writes only to a free channel that it has declared
//   in the lock. The rank that takes over the lock retires this channel, so that no rank finds or
//   binds the channel any more. Ranks that have already bound the channel to the old holder's name
//   continue to use it by its number, which is harmless. The declaration stays in the lock until
//   the channel is retired. If the new holder fails before that, the next holder retires the
//   channel. If the new holder is expelled and its process continues, the process only retires a
//   channel that must be retired anyway.
// - If the old holder had bound the declared channel to a name, that name may get another channel
//   too. This is harmless: the failed rank has posted nothing in either channel, so all survivors
//   leave this generation of the name.
// - The old holder's bits stay set in the channels that it used. So no other name is bound to these
//   channels until the failed process has been reaped (SegmentControlBlock::MarkLost). Before that,
//   the process may still write to these channels.
// Test: WithoutOne.ChannelsOfTheFailedAreRetiredIfTheNextFailsWithTheTable
// Test: WithoutOne.RankFrozenWithTheTableDelaysAndDisturbsNoOther
// Test: WithoutOne.ChannelsOfARemovedRankAreFreeOnceItIsReaped
//
// A name has a separate channel in each generation (see host_communicator.h). If a rank binds a
// name again, the name starts in generation 0 and advances to the current generation.
//
// Thread-safe.
class ChannelTable {
 public:
  // A thread that waits for the table's lock calls this function repeatedly. The function throws if
  // the wait can't succeed any more.
  using CheckWait = std::function<void(const Operation& operation, RunTime::Clock::duration waited)>;

  ChannelTable(shm::Segment& segment, const shm::SegmentControlBlock& control, uint32_t rank, CheckWait check_wait)
      : segment_(segment), control_(control), rank_(rank), check_wait_(std::move(check_wait)) {}

  // The bound name of the next operation, locked for the calling thread. The caller must advance
  // `sequence`.
  struct Use {
    std::shared_ptr<BoundName> name;
    std::unique_lock<std::mutex> lock;
  };
  Use Acquire(const Operation& operation);

  // Moves the name to a later generation, which has a new channel. The words of the old channel
  // stay unchanged while any rank has to read them. The caller must hold `busy`.
  void MoveTo(uint32_t generation, const Operation& operation, BoundName& name);

 private:
  class Lock;

  void Bind(const Operation& operation, BoundName& name);
  void EvictOne();  // the caller holds mutex_

  shm::Segment& segment_;
  const shm::SegmentControlBlock& control_;
  const uint32_t rank_;
  const CheckWait check_wait_;
  std::mutex binding_;  // held by the thread of this process that holds the shared lock or is waiting for it
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<BoundName>> names_;  // guarded by mutex_
  uint64_t clock_ = 0;                                                 // guarded by mutex_
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_CHANNEL_TABLE_H_
