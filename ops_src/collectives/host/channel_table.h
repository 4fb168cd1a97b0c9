// Assigns channels of the segment to the names of operations, at one rank.
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

// A name that this rank has bound to a channel. One thread at a time holds the name; two threads that use the same name
// take turns.
struct BoundName {
  std::mutex busy;
  // Guarded by `busy`, and valid for the name's present generation:
  uint32_t channel = 0;   // number of the channel in the segment
  uint32_t sequence = 0;  // number of operations that this rank has begun with the name
  uint32_t generation = 0;
  uint64_t last_used = 0;  // guarded by the table's mutex_
};

// Binds names to channels at first use. The k-th operation with a name matches the k-th operation
// with that name at every other rank. Ranks may use the names for the first time in any order.
//
// A channel is bound while the bit of at least one rank is set in it. Its key is valid for the same
// time. Each rank's mailboxes keep their sequence number until the last rank has released the
// channel. So a rank may release a name and bind it again while other ranks are still in the same
// operation. If a rank is about to bind more names than a quarter of the channels, it first
// releases the name that it hasn't used for longest. Hence a program may use any number of names,
// if not all of them are in use at the same time.
// Test: Names.MoreThanTheTableHoldsOverTime
//
// Two ranks must not bind one name to two channels, or two names to one channel. So names are bound
// under a lock. The lock is one word. It contains the rank that holds the lock and the channel that
// this rank is about to initialise. Releasing a channel needs no lock, because each rank clears
// only its own bit.
// Test: WithoutOne.TwoNeverHaveTheTable
//
// A rank that holds the lock may fail between any two instructions. It may also be expelled while
// its process is alive, and continue at any later time:
// - Each step on the lock is a compare-and-swap from the value that the holder itself wrote. If a
//   rank finds that the holder is in the list of failures, it takes the lock over. Then all further
//   steps of the old holder fail. (The old holder can't acquire the lock again with the same word,
//   because only one thread of a process requests the lock at a time.)
// - While a rank holds the lock, it writes plainly to one channel only. This channel is free, and
//   the rank has declared it in the lock before. The rank that takes the lock over retires this
//   channel: no rank looks the channel up or binds it again. Ranks that have bound the channel to the old holder's
//   name use the channel by its number. This is harmless. The declaration stays in the word until the channel is
//   retired. If the rank that took over fails before that, the next rank does the same, and so on. If it is expelled
//   and continues, it retires a channel that must be retired anyway.
// - If the old holder had bound the declared channel to a name, that name may get another channel
//   too. This is harmless: the failed rank has posted nothing in either channel. So all survivors
//   leave this generation of the name, in whichever channel they are.
// - The old holder's bits stay set in channels that it had bound or found bound. They keep these
//   channels from other names until the failed process is reaped (SegmentControlBlock::MarkLost).
//   Until then, the process may still write its contribution to other words of these channels.
// Test: WithoutOne.ChannelsOfTheFailedAreRetiredIfTheNextFailsWithTheTable
// Test: WithoutOne.RankFrozenWithTheTableDelaysAndDisturbsNoOther
// Test: WithoutOne.ChannelsOfARemovedRankAreFreeOnceItIsReaped
//
// A name has a different channel in each generation that it has reached (see host_communicator.h).
// If a rank binds a name again, the name begins with generation 0 and advances to the present
// generation, as it did the first time.
//
// Thread-safe.
class ChannelTable {
 public:
  // Called repeatedly by a thread that waits for the table's lock. Throws if the wait can't succeed any more.
  using CheckWait = std::function<void(const Operation& operation, RunTime::Clock::duration waited)>;

  ChannelTable(shm::Segment& segment, const shm::SegmentControlBlock& control, uint32_t rank, CheckWait check_wait)
      : segment_(segment), control_(control), rank_(rank), check_wait_(std::move(check_wait)) {}

  // Returns the bound name of the next operation, locked for the calling thread. The caller advances `sequence`.
  struct Use {
    std::shared_ptr<BoundName> name;
    std::unique_lock<std::mutex> lock;
  };
  Use Acquire(const Operation& operation);

  // Moves the name to a later generation, in a new channel. The words of the old channel stay unchanged while any rank
  // has to read them. The caller holds `busy`.
  void MoveTo(uint32_t generation, const Operation& operation, BoundName& name);

 private:
  class Lock;

  void Bind(const Operation& operation, BoundName& name);
  void EvictOne();  // the caller holds mutex_

  shm::Segment& segment_;
  const shm::SegmentControlBlock& control_;
  const uint32_t rank_;
  const CheckWait check_wait_;
  std::mutex binding_;  // held by the thread of this process that holds the shared lock or waits for it
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<BoundName>> names_;  // guarded by mutex_
  uint64_t clock_ = 0;                                                 // guarded by mutex_
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_CHANNEL_TABLE_H_
