// An all-reduce around a ring of hosts, for large amounts of data. The data has n segments, one for
// each host. Each host first sends its own segment to the next host. The next host adds its part
// and sends the sum to the host after it. After n-1 steps, the host before a segment's own host has
// the complete sum of the segment. Then the sums go around the ring once more. Each host sends and
// receives 2 (n-1)/n of the bytes.
//
// Segments are divided into pieces. Each piece is one message. A host forwards a piece as soon as
// it has added its own part. While one piece is reduced, the next piece arrives and the previous
// piece leaves.
//
// All hosts get bit-identical results. Each element is added up only once, along the ring,
// beginning with its segment's own host. Then the sum is only copied.
//
// There is no circular wait. A host waits for pieces in the order in which the previous host sends
// them. The previous host sends a piece after it has received the same piece one step earlier. Each
// host sends the pieces of the first step before it waits for anything.
//
// The sums are received directly into the output. The first kAhead of these receives are posted at
// the beginning. At that time, the same memory may still contain parts that must be read (the
// inputs, if the operation is in place). This is safe, because a sum includes this host's part. So
// this host has added or sent its part before the sum exists anywhere.
//
// The parts of other hosts are received into a window of kWindow pieces, from which this host adds
// them to its own parts. The receive of piece k + kWindow is posted when piece k has been added.
#include <algorithm>
#include <vector>

#include "base/fault_point.h"
#include "base/memory.h"
#include "collectives/dtype.h"
#include "collectives/hosts/algorithm.h"
#include "collectives/reduce.h"

namespace kungfu::hosts {
namespace {

struct Piece {
  uint64_t number;      // the same on all hosts
  size_t begin, count;  // range of the piece's elements
  bool last_step;
};

class Segments {
 public:
  Segments(uint32_t hosts, size_t count, size_t element_bytes)
      : hosts_(hosts), count_(count), piece_(kPieceBytes / element_bytes) {}

  // Appends the pieces of a segment. A negative segment number wraps around.
  void Append(int64_t segment, bool last_step, std::vector<Piece>& pieces) const {
    const auto s = static_cast<size_t>((segment + hosts_) % hosts_);
    const size_t begin = Begin(s), end = Begin(s + 1);
    uint64_t number = s * PiecesOfSegment();
    for (size_t at = begin; at < end; at += piece_) {
      pieces.push_back({number++, at, std::min(piece_, end - at), last_step});
    }
  }
  uint64_t Numbers() const { return hosts_ * PiecesOfSegment(); }

 private:
  size_t Begin(size_t segment) const { return segment * (count_ / hosts_) + std::min(segment, count_ % hosts_); }
  uint64_t PiecesOfSegment() const { return (count_ / hosts_ + 1 + piece_ - 1) / piece_; }  // an upper limit

  const size_t hosts_, count_, piece_;
};

}  // namespace

Cost Ring::CostOf(uint32_t hosts, uint64_t bytes) const {
  const uint64_t steps = 2 * (uint64_t{hosts} - 1);
  return {steps, steps * bytes / hosts};
}

void Ring::RunInRange(const AllReduceCall& call) const {
  const Group& group = call.group;
  const tcp::Tag& tag = call.tag;
  const uint32_t n = group.size();
  const int64_t place = group.place();
  const uint32_t next = static_cast<uint32_t>((place + 1) % n), before = static_cast<uint32_t>((place + n - 1) % n);
  const size_t element = SizeOf(call.dtype);
  const auto* const input = static_cast<const char*>(call.in);
  auto* const output = static_cast<char*>(call.out);
  const Segments segments(n, call.count, element);
  std::vector<Piece> own, parts, sums;
  segments.Append(place, false, own);
  for (int64_t t = 0; t < n - 1; t++) {
    segments.Append(place - t - 1, t == n - 2, parts);
    segments.Append(place - t, t == n - 2, sums);
  }
  const auto part_tag = [&](const Piece& piece) { return tag.Step(piece.number); };
  const auto sum_tag = [&](const Piece& piece) { return tag.Step(segments.Numbers() + piece.number); };

  thread_local Memory memory;  // reused, because new pages would cost as much as the copies into them
  char* const window = memory.Get(kWindow * kPieceBytes);
  // The tickets are declared after the memory, so that they are destroyed first.
  std::vector<tcp::Mesh::Ticket> parts_here, sums_here, sent;
  const auto receive_part = [&](size_t k) {
    const Piece& piece = parts[k];
    parts_here.push_back(
        group.Receive(before, part_tag(piece), window + k % kWindow * kPieceBytes, piece.count * element));
  };
  const auto send = [&](const tcp::Tag& as, const char* from, const Piece& piece) {
    sent.push_back(group.Send(next, as, from + piece.begin * element, piece.count * element));
  };
  for (size_t k = 0; k < std::min(kWindow, parts.size()); k++) receive_part(k);
  for (const Piece& piece : own) send(part_tag(piece), input, piece);
  const auto receive_sum = [&](size_t k) {
    const Piece& piece = sums[k];
    sums_here.push_back(group.Receive(before, sum_tag(piece), output + piece.begin * element, piece.count * element));
  };
  for (size_t k = 0; k < std::min(kAhead, sums.size()); k++) receive_sum(k);
  const ReduceFn reduce = ReductionFor(call.dtype, call.op);
  for (size_t k = 0; k < parts.size(); k++) {
    const Piece& piece = parts[k];
    group.Wait(parts_here[k]);
    const void* const sources[] = {window + k % kWindow * kPieceBytes, input + piece.begin * element};
    reduce(output + piece.begin * element, sources, 2, piece.count);
    KUNGFU_FAULT_POINT("between two pieces of the ring");
    if (k + kWindow < parts.size()) receive_part(k + kWindow);
    send(piece.last_step ? sum_tag(piece) : part_tag(piece), output, piece);
  }
  for (size_t k = 0; k < sums.size(); k++) {
    group.Wait(sums_here[k]);
    if (k + kAhead < sums.size()) receive_sum(k + kAhead);
    KUNGFU_FAULT_POINT("before a sum goes on around the ring");
    if (!sums[k].last_step) send(sum_tag(sums[k]), output, sums[k]);
  }
  group.WaitAll(sent);
}

}  // namespace kungfu::hosts
