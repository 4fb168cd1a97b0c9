// The memory that the ranks of one cluster version share on a host: its layout, creation and mapping.
//
// A segment is anonymous (memfd_create): it has no name that could leak or be guessed and is gone with its last
// descriptor and mapping. The launcher creates it and hands the descriptor to the members. It belongs to exactly one
// cluster version and is never reused, so that nothing half-done of a failed rank can reach the next version.
//
// The file is sparse: memory is taken when it is first touched, which for most channels and staging buffers is never.
#ifndef KUNGFU_TRANSPORT_SHM_SEGMENT_H_
#define KUNGFU_TRANSPORT_SHM_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/mapping.h"
#include "transport/shm/futex.h"

namespace kungfu::shm {

inline constexpr size_t kLine = 64;              // what two cores pass to each other
inline constexpr uint32_t kMaxRanks = 256;       // of one host
inline constexpr uint32_t kMaxMembers = 1024;    // of a job on several hosts
inline constexpr uint32_t kChannels = 2048;      // names that are bound at a time
inline constexpr uint32_t kStagingBuffers = 64;  // operations in flight that need staging
inline constexpr uint32_t kPinnedBuffers =
    32;  // more staging buffers, for those that their members keep: see staging_buffers.cc
inline constexpr uint32_t kStagingWords = 3;  // ready, reduced, done; of each rank
inline constexpr uint32_t kBuffers = 4;       // chunks that a rank stages ahead in a staging buffer
inline constexpr size_t kBufferBytes = 256 << 10;
inline constexpr size_t kInlineBytes = 40;  // an operation of this size travels in the mailbox's own cache line

// What a rank says of the operations that its threads wait in; see collectives/host/deadlock.h. Written by the rank's
// own process, one thread at a time.
struct alignas(kLine) WaitReport {
  static constexpr uint32_t kMostWaits = 8;
  static constexpr size_t kTextWords = 40;
  struct Wait {
    std::atomic<uint64_t> place;  // (channel << 32) | sequence
    std::atomic<uint64_t> generation;
  };

  std::atomic<uint64_t> version;           // odd while the rest is written
  std::atomic<uint64_t> since_ns, now_ns;  // of the host's monotonic clock: its process stood still from, and until
  std::atomic<uint64_t> num_failed;        // that it knew of
  std::atomic<uint64_t> num_waits;         // 0: it says nothing
  Wait waits[kMostWaits];
  std::atomic<uint64_t> text[kTextWords];  // the operations, and where the program is; ends with a NUL
};

// Written by the rank itself, except for the move to kLost, which only the launcher makes.
struct alignas(kLine) RankStatus {
  Counter state;       // a RankState; it only grows, and is fenced at kLost
  uint32_t has_state;  // this rank already carries the training state (it is no joining worker)
  char address[kLine * 2 - 8];
  char lost_reason[kLine * 2];                     // written by the launcher before the move to kLost
  alignas(kLine) std::atomic<uint32_t> heartbeat;  // counted up by a thread of its own, however busy the others are
  std::atomic<int32_t> core;                       // on which it was when it last waited; a hint
  std::atomic<uint32_t> busy;                      // it has said that the others' deadlines are to wait for it
  std::atomic<uint32_t> awaits;                    // a Wait: for which rank it has slept longest just now; a hint
  std::atomic<uint64_t> step;                      // that its training has ended; for readers outside
  std::atomic<uint64_t> step_ns;                   // what such a step takes; 0: that isn't known yet
  std::atomic<uint64_t> stepped_ns;                // of the host's monotonic clock, when `step` was told; 0: never
  std::atomic<uint32_t> is_ending;                 // written by the launcher: it is about to end this rank
  alignas(kLine) Counter gave_up;                  // a GaveUp, set once; what follows is written before it
  uint32_t gave_up_status;
  char gave_up_text[8 * kLine - 8];
  WaitReport wait_report;
};

// What a rank brings to operation number `sequence` of a channel. Two of them alternate: what is posted for operation
// k+1 may overwrite what was for k-1, because a rank arrives at k+1 only after it has seen post k of all ranks, and
// each rank posts k only after it is through with k-1.
struct alignas(kLine) Mailbox {
  Counter sequence;    // released after the rest of the line is written
  uint64_t signature;  // kind, dtype, op and a hash of root and layout; equal at all ranks
  uint64_t count;      // elements in all, and in the highest bits the rank's weight in a mean
  char payload[kInlineBytes];
};
static_assert(sizeof(Mailbox) == kLine);

// Says in words what a rank brought, for the message of a mismatch. Written only when one was found.
struct alignas(kLine) Complaint {
  Counter sequence;
  char text[4 * kLine - sizeof(Counter)];
};

// Shared by the ranks of a channel.
struct alignas(kLine) ChannelHead {
  std::atomic<uint64_t> key;  // hash of the name; counts only while a rank has it bound; changed under the table lock
  // A bit for each rank that has it bound. A rank sets its own under the table lock and clears it at any time; the
  // launcher clears that of a process that it has reaped.
  std::atomic<uint64_t> users[kMaxRanks / 64];
  std::atomic<uint32_t> left[2];            // ranks that are through with the operation of this parity
  std::atomic<uint64_t> staging_buffer[2];  // (sequence << 32 | staging buffer + 1) of the operation of this parity

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
  uint32_t cores;             // that the job may use on this host; decides how long a waiter spins
  uint32_t recovers;          // 1: the members go on without failed ranks
  uint32_t is_control_block;  // 1: it has the ranks of several hosts, and no channels or buffers

  alignas(kLine) std::atomic<uint64_t> announced;  // newest cluster version that the launcher knows of
  std::atomic<uint32_t> deadlines_held;            // 1: the launcher waits for the job's store; no deadline runs

  alignas(kLine) std::atomic<uint64_t> sync_points;  // that members have asked for; any of them may raise it

  // The ranks that the members go on without, in the order of their failures. Only the launcher writes here: first the
  // rank, then the number. A rank is entered when it is fenced, so that its words are as they will ever be.
  alignas(kLine) std::atomic<uint32_t> num_failed;
  uint16_t failure_order[kMaxMembers];
  static_assert(kMaxMembers - 1 <= UINT16_MAX);

  alignas(kLine) std::atomic<uint32_t> lost;  // number of ranks that ended and can't be gone on without
  std::atomic<uint32_t> gave_up;              // not 0: some rank's `gave_up` may have been set

  alignas(kLine) std::atomic<uint64_t> staging_buffers;  // bit set: staging buffer in use
  std::atomic<uint64_t> pinned_buffers;                  // likewise, of those from kStagingBuffers on
  Counter staging_waiters;  // stays at 0; stirred when a staging buffer is given back, or bound, while some wait

  // See channel_table.h: the rank that changes the table, and the channel.
  alignas(kLine) std::atomic<uint32_t> table_lock;
  std::atomic<uint64_t> retired[kChannels / 64];  // channels that a failed rank may still be writing to
};

class Segment {
 public:
  // Makes the anonymous memory for one cluster version and returns its descriptor, which the caller owns. `recovers`:
  // the members go on without failed ranks, rather than fail. `control_block`: of the ranks of several hosts, which
  // reduce elsewhere.
  static int Create(uint32_t size, uint64_t cluster_version, uint32_t cores, bool recovers = false,
                    bool control_block = false);

  // Maps a segment. The descriptor stays the caller's.
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
  // Chunks that `rank` has put into its buffers of `staging buffer`, chunks of which it has reduced its part, and
  // chunks that it is through with. They count on from one operation to the next and are equal at all ranks between
  // operations.
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
