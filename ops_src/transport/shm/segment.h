// The memory that the ranks of one cluster version share on a host: its layout, creation and
// mapping.
//
// A segment is anonymous (memfd_create): it has no name that could be guessed or left behind, and
// disappears with its last descriptor and mapping. The launcher creates the segment and passes the
// descriptor to the members. A segment belongs to one cluster version and is never reused. So the
// unfinished work of a failed rank can't affect the next version.
//
// The file is sparse, so memory is allocated when it is first used. Most channels and staging
// buffers are never used.
#ifndef KUNGFU_TRANSPORT_SHM_SEGMENT_H_
#define KUNGFU_TRANSPORT_SHM_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/mapping.h"
#include "transport/shm/futex.h"

namespace kungfu::shm {

inline constexpr size_t kLine = 64;              // the size of a cache line, which is the unit that two cores pass to
                                                 // each other
inline constexpr uint32_t kMaxRanks = 256;       // maximum number of ranks on one host
inline constexpr uint32_t kMaxMembers = 1024;    // maximum number of ranks in a job on several hosts
inline constexpr uint32_t kChannels = 2048;      // number of names that can be bound at the same time
inline constexpr uint32_t kStagingBuffers = 64;  // maximum number of running operations that need a staging buffer
inline constexpr uint32_t kPinnedBuffers = 32;   // staging buffers that their members may keep: see staging_buffers.cc
inline constexpr uint32_t kStagingWords = 3;     // number of counters per rank: ready, reduced, done
inline constexpr uint32_t kBuffers = 4;          // number of chunks that a rank can stage ahead in a staging buffer
inline constexpr size_t kBufferBytes = 256 << 10;
inline constexpr size_t kInlineBytes = 40;  // an operation with at most this many bytes fits in the mailbox's own cache
                                            // line

// A rank's report of the operations in which its threads are waiting (see
// collectives/host/deadlock.h). Only the rank's own process writes it, from one thread at a time.
struct alignas(kLine) WaitReport {
  static constexpr uint32_t kMostWaits = 8;
  static constexpr size_t kTextWords = 40;
  struct Wait {
    std::atomic<uint64_t> place;  // (channel << 32) | sequence
    std::atomic<uint64_t> generation;
  };

  std::atomic<uint64_t> version;           // odd while the other fields are being written
  std::atomic<uint64_t> since_ns, now_ns;  // the process was idle between these two times (monotonic clock)
  std::atomic<uint64_t> num_failed;        // number of failures that the process knew
  std::atomic<uint64_t> num_waits;         // 0 if there is no report
  Wait waits[kMostWaits];
  std::atomic<uint64_t> text[kTextWords];  // the names of the operations and the place in the program, terminated by a
                                           // NUL
};

// The rank itself writes these fields. Only the launcher changes the state to kLost.
struct alignas(kLine) RankStatus {
  Counter state;       // a RankState; it only grows, and is fenced when it becomes kLost
  uint32_t has_state;  // whether this rank had the training state when it joined
  char address[kLine * 2 - 8];
  char lost_reason[kLine * 2];                     // the launcher writes this before it changes the state to kLost
  alignas(kLine) std::atomic<uint32_t> heartbeat;  // incremented by a separate thread, even if all other threads are
                                                   // busy
  std::atomic<int32_t> core;                       // a hint: the core on which the rank ran when it last waited
  std::atomic<uint32_t> busy;                      // not 0 if the other ranks' deadlines are paused for this rank
  std::atomic<uint32_t> awaits;                    // a hint: see SegmentControlBlock::NoteAwaited
  std::atomic<uint64_t> step;                      // the last step that training has finished, for readers outside the
                                                   // job
  std::atomic<uint64_t> step_ns;                   // the usual duration of a step, or 0 if it isn't known yet
  std::atomic<uint64_t> stepped_ns;                // when `step` was reported (monotonic clock), or 0 if it never was
  std::atomic<uint32_t> is_ending;                 // written by the launcher: not 0 if it is about to end this rank
  std::atomic<uint32_t> activity;                  // what the program does outside its steps, for readers outside the
                                                   // job
  std::atomic<uint64_t> activity_ns;               // when `activity` changed (monotonic clock), or 0 if it never did
  alignas(kLine) Counter gave_up;                  // a GaveUp value, set only once; the fields below are written before
                                                   // it is set
  uint32_t gave_up_status;
  char gave_up_text[8 * kLine - 8];
  WaitReport wait_report;
};

// A rank's contribution to operation number `sequence` of a channel. A rank has two mailboxes per
// channel and uses them alternately. So the contribution to operation k+1 overwrites the
// contribution to k-1. This is safe, because a rank reaches k+1 only after it has seen every rank's
// contribution to k, and each rank contributes to k only after it has finished k-1.
struct alignas(kLine) Mailbox {
  Counter sequence;    // stored with release order after the rest of the line is written
  uint64_t signature;  // kind, dtype, op, and a hash of root and layout; it must be the same on all ranks
  uint64_t count;      // number of elements; the highest bits contain the rank's weight in a mean
  char payload[kInlineBytes];
};
static_assert(sizeof(Mailbox) == kLine);

// Describes a rank's operation for the message of a mismatch error. Written only if there is a
// mismatch.
struct alignas(kLine) Complaint {
  Counter sequence;
  char text[4 * kLine - sizeof(Counter)];
};

// The state of a channel, which all ranks that use the channel share.
struct alignas(kLine) ChannelHead {
  std::atomic<uint64_t> key;  // hash of the name; valid only while a rank is bound to the channel; changed only under
                              // the table's lock
  // There is one bit for each rank, which is set while the rank is bound to the channel. A rank sets
  // its own bit under the table's lock, and may clear it at any time. The launcher clears the bit of
  // a rank whose process it has reaped.
  std::atomic<uint64_t> users[kMaxRanks / 64];
  std::atomic<uint32_t> left[2];            // for operations with even and odd numbers: number of ranks that have
                                            // finished the operation
  std::atomic<uint64_t> staging_buffer[2];  // for operations with even and odd numbers: (sequence << 32 | staging
                                            // buffer + 1)

  bool IsBound() const {
    uint64_t any = 0;
    for (const auto& word : users) any |= word.load(std::memory_order_acquire);
    return any != 0;
  }
  void SetUser(uint32_t rank) { users[rank / 64].fetch_or(uint64_t{1} << rank % 64, std::memory_order_seq_cst); }
  void ClearUser(uint32_t rank) { users[rank / 64].fetch_and(~(uint64_t{1} << rank % 64), std::memory_order_acq_rel); }
};
static_assert(sizeof(ChannelHead) == kLine);

struct alignas(kLine) StagingCounter {
  Counter counter;
};

struct alignas(kLine) Header {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t size;
  uint64_t cluster_version;
  uint64_t total_bytes;
  uint32_t cores;             // number of cores that the job may use on this host; it decides how long a thread spins
  uint32_t recovers;          // 1 if the members continue without failed ranks
  uint32_t is_control_block;  // 1 if the segment is for the ranks of several hosts; it then has no channels or buffers

  alignas(kLine) std::atomic<uint64_t> announced;  // the newest cluster version that the launcher knows
  std::atomic<uint32_t> deadlines_held;            // 1 while the launcher waits for the job's store, so that no
                                                   // deadline runs

  alignas(kLine) std::atomic<uint64_t> sync_points;  // number of requested sync points; any member may increase it

  // The failed ranks, in the order of their failures, if the members continue without them. Only
  // the launcher writes these fields: first the rank, then the number. A rank is fenced before it
  // is added, so its words don't change afterwards.
  alignas(kLine) std::atomic<uint32_t> num_failed;
  uint16_t failure_order[kMaxMembers];
  static_assert(kMaxMembers - 1 <= UINT16_MAX);

  alignas(kLine) std::atomic<uint32_t> lost;  // number of failed ranks without which the members can't continue
  std::atomic<uint32_t> gave_up;              // not 0 if the `gave_up` word of some rank may be set

  alignas(kLine) std::atomic<uint64_t> staging_buffers;  // a bit is set if the staging buffer with its number is in use
  std::atomic<uint64_t> pinned_buffers;                  // the same for the pinned buffers, whose numbers begin at
                                                         // kStagingBuffers
  Counter staging_waiters;  // stays at 0; Stir is called on it when a staging buffer is released or bound while ranks
                            // wait for one

  // The rank that is changing the channel table, and the channel that it has declared. See
  // channel_table.h.
  alignas(kLine) std::atomic<uint32_t> table_lock;
  std::atomic<uint64_t> retired[kChannels / 64];  // channels to which a failed rank may still be writing
};

class Segment {
 public:
  // Creates the anonymous memory of one cluster version. Returns its descriptor, which the caller
  // owns. With `recovers`, the members continue without failed ranks. Without `recovers`, the
  // members fail. Set `control_block` for the ranks of several hosts, which reduce in other
  // segments.
  static int Create(uint32_t size, uint64_t cluster_version, uint32_t cores, bool recovers = false,
                    bool control_block = false);

  // Maps a segment. The caller still owns the descriptor.
  explicit Segment(int fd);

  uint32_t size() const { return header().size; }
  uint64_t cluster_version() const { return header().cluster_version; }
  bool is_control_block() const { return header().is_control_block != 0; }

  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankStatus& status(uint32_t rank) const { return At<RankStatus>(layout_.status, rank); }
  ChannelHead& channel(uint32_t channel) const { return At<ChannelHead>(layout_.channels, channel); }
  Mailbox& mailbox(uint32_t channel, uint32_t rank, uint32_t sequence) const {
    return At<Mailbox>(layout_.mailboxes, (static_cast<size_t>(channel) * size_ + rank) * 2 + (sequence & 1));
  }
  Complaint& complaint(uint32_t channel, uint32_t rank) const {
    return At<Complaint>(layout_.complaints, static_cast<size_t>(channel) * size_ + rank);
  }
  // The counters of `rank` in a staging buffer. ready: chunks that are in the rank's buffers.
  // reduced: chunks in which the rank has reduced its own part. done: chunks that the rank has
  // finished. The counters continue from one operation to the next. Between operations, each
  // counter has the same value on all ranks.
  Counter& ready(uint32_t staging_buffer, uint32_t rank) const { return StagingWord(staging_buffer, rank, 0); }
  Counter& reduced(uint32_t staging_buffer, uint32_t rank) const { return StagingWord(staging_buffer, rank, 1); }
  Counter& done(uint32_t staging_buffer, uint32_t rank) const { return StagingWord(staging_buffer, rank, 2); }
  char* buffer(uint32_t staging_buffer, uint32_t rank, uint32_t chunk) const {
    return base_ + layout_.buffers +
           ((static_cast<size_t>(staging_buffer) * size_ + rank) * kBuffers + chunk % kBuffers) * kBufferBytes;
  }

 private:
  struct Layout {
    size_t status, channels, mailboxes, complaints, staging_words, buffers, total;
  };
  static Layout LayoutFor(uint32_t size, bool control_block);

  template <typename T>
  T& At(size_t offset, size_t index) const {
    return reinterpret_cast<T*>(base_ + offset)[index];
  }
  Counter& StagingWord(uint32_t staging_buffer, uint32_t rank, uint32_t which) const {
    return At<StagingCounter>(layout_.staging_words,
                              (static_cast<size_t>(staging_buffer) * size_ + rank) * kStagingWords + which)
        .counter;
  }

  std::optional<Mapping> map_;
  char* base_ = nullptr;
  uint32_t size_ = 0;
  Layout layout_{};
};

}  // namespace kungfu::shm

#endif  // KUNGFU_TRANSPORT_SHM_SEGMENT_H_
