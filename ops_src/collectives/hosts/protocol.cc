#include "collectives/hosts/protocol.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "collectives/dtype.h"
#include "transport/shm/segment.h"

namespace kungfu::hosts {
namespace {

constexpr uint32_t kMagic = 0x3352464b;  // "KFR3": the last character is the version of the format

struct Fixed {
  uint32_t magic;
  uint8_t kind, dtype, op, flags;
  uint32_t root, from_generation;
  uint64_t count, signature;
  uint16_t track, what_bytes;
  uint32_t name_bytes, of_rank, program;  // these three fields and `sources` contain the lengths of the arrays that
                                          // follow
  uint32_t most, sources;
  double divisor;
};
enum Flag : uint8_t { kRenewal = 1, kWeighted = 2, kPlanes = 4, kAsks = 8, kMoreFollow = 16, kSlice = 32 };

template <typename T>
void Append(std::vector<char>& bytes, const T* from, size_t count) {
  const auto* const at = reinterpret_cast<const char*>(from);
  bytes.insert(bytes.end(), at, at + count * sizeof(T));
}

// Returns true if the program is valid: it uses only existing planes, leaves one result, and
// doesn't exceed the stack.
bool IsProgram(const Planes& planes) {
  size_t depth = 0;
  const auto count = static_cast<int64_t>(planes.count());
  for (const int32_t step : planes.program) {
    if (step == Planes::kAdd) {
      if (depth < 2) return false;
      depth--;
    } else {
      if (step < 0 || step >= count || ++depth > Planes::kMaxDepth) return false;
    }
  }
  return depth == 1;
}

}  // namespace

std::vector<char> Request::Packed() const {
  const auto flags =
      static_cast<uint8_t>((renewal ? kRenewal : 0) | (weighted ? kWeighted : 0) | (has_planes ? kPlanes : 0) |
                           (asks ? kAsks : 0) | (more_follow ? kMoreFollow : 0) | (is_slice ? kSlice : 0));
  const std::string described = what.substr(0, kTextBytes / 4);
  const Fixed fixed{kMagic,
                    static_cast<uint8_t>(kind),
                    static_cast<uint8_t>(dtype),
                    static_cast<uint8_t>(op),
                    flags,
                    root,
                    from_generation,
                    count,
                    signature,
                    track,
                    static_cast<uint16_t>(described.size()),
                    static_cast<uint32_t>(name.size()),
                    static_cast<uint32_t>(planes.of_rank.size()),
                    static_cast<uint32_t>(planes.program.size()),
                    planes.most,
                    static_cast<uint32_t>(sources.size()),
                    planes.divisor};
  std::vector<char> bytes;
  Append(bytes, &fixed, 1);
  Append(bytes, planes.of_rank.data(), planes.of_rank.size());
  Append(bytes, planes.program.data(), planes.program.size());
  Append(bytes, sources.data(), sources.size());
  Append(bytes, name.data(), name.size());
  Append(bytes, described.data(), described.size());
  if (bytes.size() > kMostBytes) {
    throw Error(KF_INVALID,
                Text(NameOf(kind), " \"", name.substr(0, 80), "\": its name and its partition of shards have ",
                     bytes.size(), " bytes; at most ", kMostBytes, " are possible between hosts"));
  }
  return bytes;
}

std::optional<Request> Request::From(const char* bytes, size_t size) {
  Fixed fixed;
  if (size < sizeof fixed) return std::nullopt;
  std::memcpy(&fixed, bytes, sizeof fixed);
  const uint64_t expected = sizeof fixed + uint64_t{4} * fixed.of_rank + uint64_t{4} * fixed.program +
                            uint64_t{4} * fixed.sources + fixed.name_bytes + fixed.what_bytes;
  if (fixed.magic != kMagic || size != expected || fixed.kind > static_cast<uint8_t>(Kind::kBarrier) ||
      !IsDtype(fixed.dtype) || !IsOp(fixed.op) || fixed.track >= kTracks) {
    return std::nullopt;
  }
  Request request;
  request.renewal = (fixed.flags & kRenewal) != 0;
  request.asks = (fixed.flags & kAsks) != 0;
  request.weighted = (fixed.flags & kWeighted) != 0;
  request.more_follow = (fixed.flags & kMoreFollow) != 0;
  request.is_slice = (fixed.flags & kSlice) != 0;
  request.has_planes = (fixed.flags & kPlanes) != 0;
  request.track = static_cast<uint8_t>(fixed.track);
  request.kind = static_cast<Kind>(fixed.kind);
  request.dtype = static_cast<kf_dtype>(fixed.dtype);
  request.op = static_cast<kf_op>(fixed.op);
  request.root = fixed.root;
  request.from_generation = fixed.from_generation;
  request.count = fixed.count;
  request.signature = fixed.signature;
  const char* at = bytes + sizeof fixed;
  Planes& planes = request.planes;
  const auto take = [&](auto& numbers, uint32_t count) {
    numbers.resize(count);
    if (count > 0) std::memcpy(numbers.data(), at, 4 * numbers.size());
    at += 4 * numbers.size();
  };
  take(planes.of_rank, fixed.of_rank);
  take(planes.program, fixed.program);
  take(request.sources, fixed.sources);
  planes.most = fixed.most;
  planes.divisor = fixed.divisor;
  request.name.assign(at, fixed.name_bytes);
  request.what.assign(at + fixed.name_bytes, fixed.what_bytes);
  if (request.name.empty()) return std::nullopt;
  if (request.count > kMostElements) return std::nullopt;
  for (const uint32_t n : planes.of_rank) {
    if (n > std::min(planes.most, kMostPlanes)) return std::nullopt;
  }
  if (request.has_planes && (request.kind != Kind::kAllReduce || !IsProgram(planes))) return std::nullopt;
  return request;
}

Places::Places(std::vector<uint32_t> host_of_rank) : host_of_(std::move(host_of_rank)), local_of_(host_of_.size()) {
  if (host_of_.empty()) throw Error(KF_INVALID, "a cluster has at least 1 rank");
  ranks_on_.resize(*std::max_element(host_of_.begin(), host_of_.end()) + 1);
  for (uint32_t rank = 0; rank < host_of_.size(); rank++) {
    std::vector<uint32_t>& there = ranks_on_[host_of_[rank]];
    local_of_[rank] = static_cast<uint32_t>(there.size());
    there.push_back(rank);
  }
  for (uint32_t host = 0; host < hosts(); host++) {
    if (ranks_on_[host].empty()) throw Error(KF_INVALID, Text("host ", host, " has no ranks"));
    if (ranks_on_[host].size() >= shm::kMaxRanks) {
      throw Error(KF_INVALID, Text("host ", host, " has ", SizeOf(host), " ranks; at most ", shm::kMaxRanks - 1));
    }
  }
}

std::optional<uint32_t> Places::SourceOn(uint32_t host, uint32_t root, const Members& sources) const {
  if (HostOf(root) == host) return root;
  for (const uint32_t rank : sources) {
    if (HostOf(rank) == host) return rank;
  }
  return std::nullopt;
}

uint32_t Places::NumFailedOn(uint32_t host, uint32_t generation, const ControlBlock& control) const {
  uint32_t failed = 0;
  for (uint32_t d = 0; d < generation; d++) failed += host_of_[control.FailedRank(d)] == host ? 1 : 0;
  return failed;
}

std::optional<uint32_t> Places::GenerationWithout(uint32_t host, uint32_t failed, const ControlBlock& control) const {
  if (failed == 0) return 0;
  const uint32_t num_failed = control.num_failed();
  for (uint32_t d = 0; d < num_failed; d++) {
    if (host_of_[control.FailedRank(d)] == host && --failed == 0) return d + 1;
  }
  return std::nullopt;
}

}  // namespace kungfu::hosts
