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
#include "transport/shm/board.h"
#include "transport/shm/segment.h"

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

// Binds names to channels at first use. The k-th operation under a name matches the k-th of every other rank, in
// whatever order the names themselves come up at each rank.
//
// A channel is bound while some rank's bit is set in it, and what its key says counts for as long. Until the last rank
// gives it back each rank's mailboxes keep its sequence, so that a rank may give a name back and bind it again while
// others are still at the same operation. A rank that is about to bind more names than a quarter of the channels first
// gives back the one it has not used for longest, hence programs may use any number of names as long as not all are in
// use at a time.
//
// Two ranks must not give one name two channels, nor two names one: names are bound under a lock, one word that says
// who has it and which channel it is about to make new. Giving back needs no lock, only the rank's own bit. A holder
// may die, or be expelled while it lives, between any two instructions, and even go on after years:
//   - Each step on the lock is a compare-and-swap from what the holder itself put there. Who finds it held by a rank in
//     the list of deaths takes it over, after which all further steps of the old holder fail. (It can't come to hold it
//     again, so that the word would look as before: within a process one thread at a time asks for it.)
//   - Between taking and giving back the lock a holder writes plainly to one channel only, free, and declared in the
//     lock before. Who takes the lock over retires that channel: nobody ever looks it up or binds it again. Those who
//     have bound it under the old holder's name know it by its number and are not in the way of anything. The one who
//     takes over keeps the declaration in the word until the channel is retired; if it dies before that, the next one
//     does the same, and so on; if it is expelled and goes on, it retires what is to be retired anyway.
//   - If the old holder did bind that channel to a name, another one may now be bound to it as well. No harm: the dead
//     rank has posted nothing in either, so all survivors leave this generation of the name, wherever they are.
//   - Its own bits, in channels that it had bound or found bound, keep these channels from being used for other names
//     until it is reaped (Board::MarkLost): until then it may still write its part of their other words.
//
// A name has a channel in each generation (see host_communicator.h) that it has come to. A rank that binds a name again
// begins with generation 0 and is led to the present one as it was the first time.
//
// Thread-safe.
class ChannelTable {
 public:
  // Called now and then by a thread that waits for the table; throws where that has become pointless.
  using CheckWait = std::function<void(const Operation& operation, RunTime::Clock::duration waited)>;

  ChannelTable(shm::Segment& segment, const shm::Board& board, uint32_t rank, CheckWait check_wait)
      : segment_(segment), board_(board), rank_(rank), check_wait_(std::move(check_wait)) {}

  // The channel for the next operation under its name, locked for the calling thread. The caller advances `sequence`.
  struct Use {
    std::shared_ptr<BoundName> name;
    std::unique_lock<std::mutex> lock;
  };
  Use Acquire(const Operation& operation);

  // On to a later generation of the name, with words of its own. The old ones stay as they are while anybody has to
  // read them. The caller holds `busy`.
  void MoveTo(uint32_t generation, const Operation& operation, BoundName& name);

 private:
  class Lock;

  void Bind(const Operation& operation, BoundName& name);
  void EvictOne();  // mutex_ is held

  shm::Segment& segment_;
  const shm::Board& board_;
  const uint32_t rank_;
  const CheckWait check_wait_;
  std::mutex binding_;  // held by the thread of this process that has the shared lock, or waits for it
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<BoundName>> names_;  // guarded by mutex_
  uint64_t clock_ = 0;                                                 // guarded by mutex_
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_CHANNEL_TABLE_H_
