// The state of a running operation on one rank.
#ifndef KUNGFU_COLLECTIVES_HOST_FLIGHT_H_
#define KUNGFU_COLLECTIVES_HOST_FLIGHT_H_

#include <algorithm>
#include <cstdint>
#include <optional>

#include "collectives/dtype.h"
#include "collectives/host/channel_table.h"
#include "collectives/host/deadline.h"
#include "collectives/host/transfer.h"
#include "collectives/operation.h"
#include "transport/shm/segment.h"

namespace kungfu::host {

// If there are more ranks than cores, each wait costs a context switch. So a rank stages up to this
// many bytes at once, as one chunk that fills all its buffers.
inline constexpr size_t kWholeBytes = 3 * shm::kBufferBytes;
// An all-reduce with at least this many ranks is split among the ranks.
inline constexpr uint32_t kSplitRanks = 3;
// An all-reduce whose data could be staged at once is still split if all ranks together contribute
// more bytes than this. A split costs one more context switch, but each rank reads less data. For
// 256 KiB on two cores, a split all-reduce takes 80 us instead of 130 us with four ranks, and 180
// us instead of 510 us with eight ranks.
inline constexpr size_t kSplitWholeBytes = 384 << 10;

struct Flight {
  Flight(const Operation& op, const BoundName& name, const Members& of, uint32_t size, bool oversubscribed)
      : operation(op),
        members(of),
        generation(name.generation),
        channel(name.channel),
        sequence((name.sequence + 1) & shm::Counter::kMask),
        signature(SignatureOf(op)),
        count(CountOf(op)),
        unit(SizeOf(op.dtype)),
        parts(op.kind == Kind::kReduceScatter ? size : 1),
        planes(op.planes == nullptr ? 1 : op.planes->most),
        part_bytes(count * unit / parts),
        whole(oversubscribed && part_bytes * parts * planes <= kWholeBytes),
        splits(op.kind == Kind::kAllReduce && of.size() >= kSplitRanks &&
               part_bytes * planes > (whole ? kSplitWholeBytes / of.size() : shm::kBufferBytes)),
        chunk_bytes((whole ? shm::kBuffers : 1) * shm::kBufferBytes / parts / planes / shm::kLine * shm::kLine),
        chunks(static_cast<uint32_t>((part_bytes + chunk_bytes - 1) / chunk_bytes)),
        inlined(count * unit * planes <= shm::kInlineBytes),
        reduce(op) {}

  bool AtOnce() const { return inlined || (chunks <= 1 && !splits); }
  bool Brings(uint32_t rank) const {
    if (operation.kind == Kind::kBroadcast) return operation.root == rank;
    return !IsToRoot(operation.kind) || operation.root != rank;
  }
  // Returns true if the rank reads the other ranks' contributions.
  bool Reads(uint32_t rank) const { return !IsToRoot(operation.kind) || operation.root == rank; }
  uint32_t BufferOf(uint32_t chunk) const { return whole ? 0 : chunk; }
  // Returns the number of bytes that this rank reads from every other rank that contributes.
  uint64_t ReadFromEach() const { return splits ? (planes + 1) * part_bytes / members.size() : planes * part_bytes; }
  size_t BytesOf(uint32_t chunk) const { return std::min(chunk_bytes, part_bytes - chunk * chunk_bytes); }
  // Returns true if all chunks of a rank fit in its buffers at the same time, one after another.
  bool FitsStagingBuffer() const {
    return part_bytes <= shm::kBuffers * shm::kBufferBytes && parts == 1 && planes == 1;
  }
  // Returns true if the root leaves the data in the staging buffer, because only one rank
  // contributes.
  bool StaysInStagingBuffer() const { return pinned && operation.kind == Kind::kReduceTo && members.size() == 2; }
  // Returns the prefix of messages about this operation.
  std::string Title() const { return TitleOf(operation); }

  const Operation& operation;
  const Members& members;
  const uint32_t generation;
  const uint32_t channel;
  const uint32_t sequence;
  const uint64_t signature;
  const uint64_t count;  // number of elements that a rank contributes
  const size_t unit;     // number of bytes of one element
  const uint32_t parts;  // number of parts in a reduce-scatter, and 1 in any other operation
  const size_t planes;   // the largest number of planes of a rank, or 1 without planes
  const size_t part_bytes;
  const bool whole;          // true if the data is staged at once, in all of the rank's buffers
  const bool splits;         // true if each rank reduces a part of the data
  const size_t chunk_bytes;  // number of bytes of a part in one chunk; a multiple of the cache line, so that parts stay
                             // aligned
  const uint32_t chunks;
  const bool inlined;  // true if the data is in the mailboxes
  Reducer reduce;
  bool bound = false;           // true if a staging buffer is bound; only then are the fields below valid
  uint32_t staging_buffer = 0;  // the number of the staging buffer
  bool pinned = false;          // true if the members keep the staging buffer after the operation has ended
  uint32_t base = 0;            // this rank's `ready` and `done` counters when the operation began
  uint32_t base_reduced = 0;    // this rank's `reduced` counter when the operation began
  bool differs = false;         // true if a rank has posted a different operation
  // The deadline of the whole operation. The deadline begins at the first wait that is longer than
  // a spin, so most operations never read the clock.
  std::optional<Deadline> deadline;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_FLIGHT_H_
