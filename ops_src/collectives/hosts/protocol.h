// What the ranks of a host and their transport send each other besides data. The terms: transport.h.
#ifndef KUNGFU_COLLECTIVES_HOSTS_PROTOCOL_H_
#define KUNGFU_COLLECTIVES_HOSTS_PROTOCOL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "collectives/dtype.h"
#include "collectives/operation.h"
#include "collectives/reduce.h"
#include "transport/control_block.h"
#include "transport/shm/segment.h"

namespace kungfu::hosts {

// How many slices of an operation go side by side: slices.h.
inline constexpr uint32_t kTracks = 4;

// A rank begins an operation, or, with `renewal`, brings it in another generation. One message of a SOCK_SEQPACKET.
struct Request {
  bool renewal = false;
  // Nothing begins: the rank asks what the operation of this name waits for. The answer comes by the same socket:
  // `count` as it was here, in 8 bytes, and the words.
  bool asks = false;
  Kind kind = Kind::kBarrier;
  kf_dtype dtype = KF_UINT8;
  kf_op op = KF_SUM;
  bool weighted = false;
  // Its ranks bring more after the commit (Commit::kMore) that all hosts bring the same here: see slices.h.
  bool more_follow = false;
  bool is_slice = false;         // others of the same whole go beside it
  uint8_t track = 0;             // the one on which it goes
  uint32_t root = 0;             // in the cluster
  uint32_t from_generation = 0;  // and not in an earlier one
  uint64_t count = 0;            // elements that a rank brings
  uint64_t signature = 0;
  std::string name, what;  // `what`: for the message of a mismatch
  // Of an operation with planes, as it is in `from_generation`: Planes' of_rank, most, program, divisor.
  bool has_planes = false;
  Planes planes;
  Members sources;  // of a broadcast, as Operation has them

  std::vector<char> Packed() const;
  // None if the bytes, which come from another process, are no request.
  static std::optional<Request> From(const char* bytes, size_t size);

  static constexpr uint64_t kMostElements = uint64_t{1} << 40;  // what a mailbox can say
  static constexpr uint32_t kMostPlanes = 4096;                 // of a rank
  static constexpr size_t kMostBytes = 160 << 10;               // a socket takes that at once with Linux's defaults
};

// The transport's decision on an operation, for all ranks of its host. Ranks wait for it as long as other hosts take.
// So it is a broadcast that is inlined: one with a staging buffer would keep it from ranks that wait for one
// (staging_buffers.cc, 12).
struct Commit {
  enum What : uint8_t {
    kDone = 1,    // the result is in the staging buffer, or in this very message, or follows
    kAgain = 2,   // to be brought again, in `generation`
    kFailed = 3,  // with `status`; the text follows
    kMore = 4,    // nothing came of it yet, but all hosts bring the same; another commit follows
  };
  uint8_t what = kDone;
  uint8_t status = KF_OK;
  uint8_t goes_on = 0;           // of a failure: all ranks have it, and the communicator can be used on
  uint8_t in_pinned_buffer = 0;  // of kDone: the result is in the transport's part of the pinned buffer
  uint32_t generation = 0;
};
// What is broadcast: of `result` as many bytes as the operation has BytesWithCommit.
struct CommitAndResult {
  Commit commit;
  char result[shm::kInlineBytes - sizeof(Commit)] = {};
};
static_assert(sizeof(CommitAndResult) == shm::kInlineBytes);
inline constexpr size_t kTextBytes = 1024;

// Whether a host's transport gets what each of its ranks brings, rather than their sum.
inline bool GoesInRows(Kind kind, kf_dtype dtype, kf_op op) {
  return kind == Kind::kAllGather || (Reduces(kind) && op == KF_MEAN && BlendFor(dtype) == nullptr);
}
inline bool GoesInRows(const Operation& operation) { return GoesInRows(operation.kind, operation.dtype, operation.op); }

// Whether the staging buffer in which a host's ranks bring their parts, if they are no planes, is kept for the result.
inline bool PinsBuffer(Kind kind, kf_dtype dtype, kf_op op) {
  return kind == Kind::kAllReduce && !GoesInRows(kind, dtype, op);
}

// The bytes of such a part, if they are so few that hosts tell them each other with the words about it; else 0.
inline constexpr size_t kSmallBytes = 40;
inline size_t SmallBytes(Kind kind, kf_dtype dtype, kf_op op, uint64_t count) {
  if (!PinsBuffer(kind, dtype, op) || count > kSmallBytes || count * SizeOf(dtype) > kSmallBytes) return 0;
  return count * SizeOf(dtype);
}

// Of its result, which goes to the ranks with the commit; else 0.
inline size_t BytesWithCommit(Kind kind, kf_dtype dtype, kf_op op, uint64_t count) {
  const size_t bytes = SmallBytes(kind, dtype, op, count);
  return bytes <= sizeof(CommitAndResult::result) ? bytes : 0;
}

// On which hosts a cluster's ranks are, the same at all ranks.
class Places {
 public:
  explicit Places(std::vector<uint32_t> host_of_rank);

  uint32_t ranks() const { return static_cast<uint32_t>(host_of_.size()); }
  uint32_t hosts() const { return static_cast<uint32_t>(ranks_on_.size()); }
  uint32_t HostOf(uint32_t rank) const { return host_of_[rank]; }
  // In ascending order.
  const std::vector<uint32_t>& RanksOn(uint32_t host) const { return ranks_on_[host]; }
  uint32_t SizeOf(uint32_t host) const { return static_cast<uint32_t>(ranks_on_[host].size()); }
  // Among those of its host; that of the host's transport is one more than the last.
  uint32_t LocalOf(uint32_t rank) const { return local_of_[rank]; }
  uint32_t TransportOf(uint32_t host) const { return SizeOf(host); }
  // The rank of `host` from which the host's other ranks take a broadcast; none: it comes from another host.
  std::optional<uint32_t> SourceOn(uint32_t host, uint32_t root, const Members& sources) const;

  // How many of the cluster's first `generation` failed ranks were on `host`.
  uint32_t NumFailedOn(uint32_t host, uint32_t generation, const ControlBlock& control) const;
  // The earliest generation of the cluster that is without the first `failed` ranks of that host; none as long as
  // `control` hasn't listed them.
  std::optional<uint32_t> GenerationWithout(uint32_t host, uint32_t failed, const ControlBlock& control) const;

 private:
  std::vector<uint32_t> host_of_, local_of_;
  std::vector<std::vector<uint32_t>> ranks_on_;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_PROTOCOL_H_
