// Which channel of the segment a name uses, from the view of one rank.
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

// One name of this rank. Held by one thread at a time; two threads under one name take turns.
struct BoundName {
  std::mutex busy;
  // Guarded by `busy`, for the name's present generation:
  uint32_t channel = 0;   // of the segment
  uint32_t sequence = 0;  // operations that this rank has begun under the name
  uint32_t generation = 0;
  uint64_t last_used = 0;  // guarded by the table
};

// Binds names to channels at first use. The k-th operation under a name matches the k-th of every
// other rank, in any order of first use of the names.
//
// A channel is bound while the bit of some rank is set in it, and its key counts for as long. Until
// the last rank gives it back, each rank's mailboxes keep its sequence. So a rank may give a name
// back and bind it again while other ranks are still at the same operation. A rank that is about to
// bind more names than a quarter of the channels first gives back the one that it has not used for
// longest. Hence programs may use any number of names, as long as not all are in use at a time.
// Test: Names.MoreThanTheTableHoldsOverTime
//
// Two ranks must not give one name two channels, nor two names one. So names are bound under a
// lock: one word with its holder and the channel that the holder is about to make new. Giving back
// needs no lock, only the rank's own bit.
// Test: WithoutOne.TwoNeverHaveTheTable
//
// A holder may fail, or be expelled while it lives, between any two instructions, and even continue
// after years:
// - Each step on the lock is a compare-and-swap from what the holder itself put there. A rank that
//   finds it held by a rank in the list of failures takes it over. After that all further steps of
//   the old holder fail. (It can't come to hold the lock again, with the word as before: within a
//   process one thread at a time asks for it.)
// - Between taking and giving back the lock, a holder writes plainly to one channel only, which is
//   free and declared in the lock before. The rank that takes the lock over retires that channel:
//   no rank looks it up or binds it again. Ranks that have bound it under the old holder's name
//   know it by its number and disturb nothing. The rank that takes over keeps the declaration in
//   the word until the channel is retired. If it fails before that, the next one does the same, and
//   so on. If it is expelled and continues, it retires what is to be retired anyway.
// - If the old holder did bind that channel to a name, another channel may now be bound to that
//   name too. This is harmless: the failed rank has posted nothing in either, so all survivors
//   leave this generation of the name, wherever they are.
// - Its own bits, in channels that it had bound or found bound, keep these channels from other
//   names until it is reaped (SegmentControlBlock::MarkLost). Until then it may still write its
//   contribution to their other words.
// Test: WithoutOne.ChannelsOfTheFailedAreRetiredIfTheNextFailsWithTheTable
// Test: WithoutOne.RankFrozenWithTheTableDelaysAndDisturbsNoOther
// Test: WithoutOne.ChannelsOfARemovedRankAreFreeOnceItIsReaped
//
// A name has a channel in each generation (see host_communicator.h) that it has come to. A rank
// that binds a name again begins with generation 0 and advances to the present one as it did the
// first time.
//
// Thread-safe.
class ChannelTable {
 public:
  // Called now and then by a thread that waits for the table; throws if that has become pointless.
  using CheckWait = std::function<void(const Operation& operation, RunTime::Clock::duration waited)>;

  ChannelTable(shm::Segment& segment, const shm::SegmentControlBlock& control, uint32_t rank, CheckWait check_wait)
      : segment_(segment), control_(control), rank_(rank), check_wait_(std::move(check_wait)) {}

  // The channel for the next operation under its name, locked for the calling thread. The caller advances `sequence`.
  struct Use {
    std::shared_ptr<BoundName> name;
    std::unique_lock<std::mutex> lock;
  };
  Use Acquire(const Operation& operation);

  // On to a later generation of the name, with words of its own. The old ones stay as they are while any rank has to
  // read them. The caller holds `busy`.
  void MoveTo(uint32_t generation, const Operation& operation, BoundName& name);

 private:
  class Lock;

  void Bind(const Operation& operation, BoundName& name);
  void EvictOne();  // mutex_ is held

  shm::Segment& segment_;
  const shm::SegmentControlBlock& control_;
  const uint32_t rank_;
  const CheckWait check_wait_;
  std::mutex binding_;  // held by the thread of this process that has the shared lock, or waits for it
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<BoundName>> names_;  // guarded by mutex_
  uint64_t clock_ = 0;                                                 // guarded by mutex_
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_CHANNEL_TABLE_H_
