// The messages between the ranks of a host and their transport, except for the data itself.
// transport.h defines the terms.
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

// The number of slices of an operation that run concurrently (see slices.h).
inline constexpr uint32_t kTracks = 4;

// A message from a rank to its transport: the rank begins an operation or, with `renewal`,
// contributes again to a running operation in another generation. Each request is one message on a
// SOCK_SEQPACKET socket.
struct Request {
  bool renewal = false;
  // If true, the rank begins no operation. Instead, it asks which hosts the operation with this
  // name is waiting for. The answer arrives on the same socket: the value of `count` in 8 bytes,
  // followed by text.
  bool asks = false;
  Kind kind = Kind::kBarrier;
  kf_dtype dtype = KF_UINT8;
  kf_op op = KF_SUM;
  bool weighted = false;
  // If true, the ranks contribute the other slices after a commit with Commit::kMore. This commit
  // reports that all hosts run the same operation (see slices.h).
  bool more_follow = false;
  bool is_slice = false;         // true if other slices of the same operation run concurrently
  uint8_t track = 0;             // the track of the slice
  uint32_t root = 0;             // rank in the cluster
  uint32_t from_generation = 0;  // the earliest generation in which the operation may run
  uint64_t count = 0;            // number of elements that a rank contributes
  uint64_t signature = 0;
  std::string name, what;  // `what` describes the operation in a mismatch error
  // Set for an operation that adds up planes (planes.h) in generation `from_generation`. `planes`
  // then contains the fields of_rank, most, program and divisor.
  bool has_planes = false;
  Planes planes;
  Members sources;  // for a broadcast: the value of Operation::sources

  std::vector<char> Packed() const;
  // Returns none if the bytes, which come from another process, are not a valid request.
  static std::optional<Request> From(const char* bytes, size_t size);

  static constexpr uint64_t kMostElements = uint64_t{1} << 40;  // the limit of a mailbox's count
  static constexpr uint32_t kMostPlanes = 4096;                 // per rank
  static constexpr size_t kMostBytes = 160 << 10;  // with Linux's default settings, a socket accepts this many bytes at
                                                   // once
};

// The transport's decision on an operation, which the transport sends to all ranks of its host.
// Ranks may wait a long time for the decision, until the other hosts have contributed. So the
// decision is sent by a broadcast whose data is inlined. A broadcast with a staging buffer would
// occupy that buffer during the whole wait (see invariant 12 in staging_buffers.cc).
struct Commit {
  enum What : uint8_t {
    kDone = 1,    // the result is in the staging buffer or in this message, or follows in a broadcast
    kAgain = 2,   // the ranks must contribute again, in `generation`
    kFailed = 3,  // the operation failed with `status`; the text follows
    kMore = 4,    // no decision yet, but all hosts contribute the same operation; another commit follows
  };
  uint8_t what = kDone;
  uint8_t status = KF_OK;
  uint8_t goes_on = 0;           // with kFailed: true if all ranks fail in the same way, so that the communicator stays
                                 // usable
  uint8_t in_pinned_buffer = 0;  // with kDone: true if the result is in the transport's part of the pinned buffer
  uint32_t generation = 0;
};
// The data of the broadcast that sends a commit. Only the first BytesWithCommit(...) bytes of
// `result` are sent.
struct CommitAndResult {
  Commit commit;
  char result[shm::kInlineBytes - sizeof(Commit)] = {};
};
static_assert(sizeof(CommitAndResult) == shm::kInlineBytes);
inline constexpr size_t kTextBytes = 1024;

// Returns true if a host's transport gets each rank's contribution separately, instead of their
// sum.
inline bool GoesInRows(Kind kind, kf_dtype dtype, kf_op op) {
  return kind == Kind::kAllGather || (Reduces(kind) && op == KF_MEAN && BlendFor(dtype) == nullptr);
}
inline bool GoesInRows(const Operation& operation) { return GoesInRows(operation.kind, operation.dtype, operation.op); }

// Returns true if the staging buffer with the contributions of a host's ranks is kept for the
// result. Call this function only for operations without planes.
inline bool PinsBuffer(Kind kind, kf_dtype dtype, kf_op op) {
  return kind == Kind::kAllReduce && !GoesInRows(kind, dtype, op);
}

// Returns the size of a host's contribution in bytes if the hosts send it in their headers. Returns
// 0 if the contribution is too large for a header.
inline constexpr size_t kSmallBytes = 40;
inline size_t SmallBytes(Kind kind, kf_dtype dtype, kf_op op, uint64_t count) {
  if (!PinsBuffer(kind, dtype, op) || count > kSmallBytes || count * SizeOf(dtype) > kSmallBytes) return 0;
  return count * SizeOf(dtype);
}

// Returns the size of the result in bytes if the ranks get it together with the commit. Returns 0
// if the result is too large.
inline size_t BytesWithCommit(Kind kind, kf_dtype dtype, kf_op op, uint64_t count) {
  const size_t bytes = SmallBytes(kind, dtype, op, count);
  return bytes <= sizeof(CommitAndResult::result) ? bytes : 0;
}

// Maps each rank of the cluster to its host. Equal on all ranks.
class Places {
 public:
  explicit Places(std::vector<uint32_t> host_of_rank);

  uint32_t ranks() const { return static_cast<uint32_t>(host_of_.size()); }
  uint32_t hosts() const { return static_cast<uint32_t>(ranks_on_.size()); }
  uint32_t HostOf(uint32_t rank) const { return host_of_[rank]; }
  // Returns the ranks on `host`, in ascending order.
  const std::vector<uint32_t>& RanksOn(uint32_t host) const { return ranks_on_[host]; }
  uint32_t SizeOf(uint32_t host) const { return static_cast<uint32_t>(ranks_on_[host].size()); }
  // Returns the index of a rank among the ranks of its host. The index of the host's transport is
  // the next number after these indices.
  uint32_t LocalOf(uint32_t rank) const { return local_of_[rank]; }
  uint32_t TransportOf(uint32_t host) const { return SizeOf(host); }
  // Returns the rank on `host` from which the other ranks of `host` copy a broadcast's data.
  // Returns none if the data comes from another host.
  std::optional<uint32_t> SourceOn(uint32_t host, uint32_t root, const Members& sources) const;

  // Returns how many of the cluster's first `generation` failed ranks were on `host`.
  uint32_t NumFailedOn(uint32_t host, uint32_t generation, const ControlBlock& control) const;
  // Returns the earliest generation of the cluster that excludes the first `failed` failed ranks of
  // `host`. Returns none if `control` doesn't list these failures yet.
  std::optional<uint32_t> GenerationWithout(uint32_t host, uint32_t failed, const ControlBlock& control) const;

 private:
  std::vector<uint32_t> host_of_, local_of_;
  std::vector<std::vector<uint32_t>> ranks_on_;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_PROTOCOL_H_
