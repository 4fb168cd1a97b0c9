// An operation under way at this rank.
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

// With more ranks than cores each wait costs a change of the running rank, so a rank brings up to this much at once, as
// one chunk that takes all of its buffers.
inline constexpr size_t kWholeBytes = 3 * shm::kBufferBytes;
// From this number of ranks on an all-reduce is split among them.
inline constexpr uint32_t kSplitRanks = 3;
// What would be brought at once is split if all ranks together bring more than this: one more change of the running
// rank, against each rank's reading everything (four ranks on two cores, 256 KiB: 80 us instead of 130; eight: 180
// instead of 510).
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
  // Whether the rank makes anything of what the others bring.
  bool Reads(uint32_t rank) const { return !IsToRoot(operation.kind) || operation.root == rank; }
  // The buffer that chunk `chunk` goes into.
  uint32_t BufferOf(uint32_t chunk) const { return whole ? 0 : chunk; }
  // Bytes that this rank reads from another one's part of the segment, if that one brings something.
  uint64_t ReadFromEach() const { return splits ? (planes + 1) * part_bytes / members.size() : planes * part_bytes; }
  size_t BytesOf(uint32_t chunk) const { return std::min(chunk_bytes, part_bytes - chunk * chunk_bytes); }
  // Whether the chunks that a rank brings stay in its buffers, one behind the other.
  bool FitsStagingBuffer() const {
    return part_bytes <= shm::kBuffers * shm::kBufferBytes && parts == 1 && planes == 1;
  }
  // Whether the root leaves what is brought where one rank alone has staged it.
  bool StaysInStagingBuffer() const { return pinned && operation.kind == Kind::kReduceTo && members.size() == 2; }
  // How its messages begin.
  std::string Title() const { return TitleOf(operation); }

  const Operation& operation;
  const Members& members;
  const uint32_t generation;
  const uint32_t channel;
  const uint32_t sequence;
  const uint64_t signature;
  const uint64_t count;  // elements that a rank brings
  const size_t unit;     // bytes of one
  const uint32_t parts;  // into which they are scattered
  const size_t planes;   // that a rank brings at most
  const size_t part_bytes;
  const bool whole;          // brought at once, in all buffers
  const bool splits;         // each rank reduces a part of it
  const size_t chunk_bytes;  // of a part at a time; whole cache lines, so that parts stay aligned
  const uint32_t chunks;
  const bool inlined;  // it travels in the mailboxes
  Reducer reduce;
  bool bound = false;           // a staging buffer has been bound, and these are its words as the operation began:
  uint32_t staging_buffer = 0;  //
  bool pinned = false;          // its members keep it after the end
  uint32_t base = 0;            // ready and done
  uint32_t base_reduced = 0;    //
  bool differs = false;         // some rank has posted another operation
  // Of the whole operation, from its first wait that is more than a spin on: most never read the clock.
  std::optional<Deadline> deadline;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_FLIGHT_H_
