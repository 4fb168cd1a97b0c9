// An all-reduce for small amounts of data. In step k, each host exchanges all its data with the
// host whose place differs from its own place only in bit k. After log2(n) steps, all hosts have
// the sum.
//
// If n isn't a power of two, let p be the largest power of two below n. The first 2 * (n - p) hosts
// form pairs. The second host of each pair sends its contribution to the first host, and gets the
// result at the end.
//
// All hosts get bit-identical results. A block is a set of hosts whose places are equal except for
// the last k bits. Before step k, all hosts of a block have bit-identical data. In step k, the
// hosts of two blocks all compute (data of the lower block) op (data of the upper block), in this
// order. The second hosts of the pairs get a copy.
//
// All receives are posted at the beginning, each with separate memory. The sum of a step is
// computed in the memory of the step's receive. So the data that a step sends stays unchanged until
// it has been sent. There is one exception: in an in-place operation, the second host of a pair
// sends its data from the memory into which it receives the result. This is safe: the result
// includes this data, so the data was sent before the result arrives.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/fault_point.h"
#include "base/memory.h"
#include "collectives/dtype.h"
#include "collectives/hosts/algorithm.h"
#include "collectives/reduce.h"

namespace kungfu::hosts {
namespace {

// The numbers of the operation's messages. Step k uses number kStep + k.
enum : uint64_t { kGive = 0, kResult = 1, kStep = 2 };

// Returns how many times 1 can be doubled without exceeding `hosts`.
uint32_t Doublings(uint32_t hosts) {
  uint32_t doublings = 0;
  while (hosts >> (doublings + 1) != 0) doublings++;
  return doublings;
}

void Copy(void* out, const void* in, size_t bytes) {
  if (out != in && bytes > 0) std::memcpy(out, in, bytes);
}

}  // namespace

Cost Doubling::CostOf(uint32_t hosts, uint64_t bytes) const {
  const uint64_t steps = Doublings(hosts) + ((hosts & (hosts - 1)) == 0 ? 0 : 2);
  return {steps, steps * bytes};
}

void Doubling::RunInRange(const AllReduceCall& call) const {
  const Group& group = call.group;
  const tcp::Tag& tag = call.tag;
  const size_t bytes = call.count * SizeOf(call.dtype);
  const uint32_t place = group.place();
  const uint32_t steps = Doublings(group.size()), power = 1u << steps;
  const uint32_t pairs = group.size() - power;
  const bool in_pair = place < 2 * pairs;
  if (in_pair && place % 2 == 1) {
    const auto result = group.Receive(place - 1, tag.Step(kResult), call.out, bytes);
    const auto given = group.Send(place - 1, tag.Step(kGive), call.in, bytes);
    group.Wait(given);
    group.Wait(result);
    return;
  }
  // The first hosts of the pairs and the hosts without a pair have their own numbering. `own` is
  // this host's number. `place_of(other)` returns the place of the host with number `other`.
  const uint32_t own = in_pair ? place / 2 : place - pairs;
  const auto place_of = [&](uint32_t other) { return other < pairs ? 2 * other : other + pairs; };

  thread_local Memory memory;  // reused, because new pages would cost as much as the copies into them
  const size_t room = Aligned(std::max<size_t>(bytes, 1));
  char* const slots = memory.Get((steps + 1) * room);
  std::vector<tcp::Mesh::Ticket> received, sent;  // declared after the memory, so that the tickets are destroyed first
  for (uint32_t k = 0; k < steps; k++) {
    received.push_back(group.Receive(place_of(own ^ 1u << k), tag.Step(kStep + k), slots + k * room, bytes));
  }
  const ReduceFn reduce = ReductionFor(call.dtype, call.op);
  const void* sum = call.in;
  const auto add = [&](char* other, bool is_lower) {
    const void* const sources[] = {is_lower ? other : sum, is_lower ? sum : other};
    reduce(other, sources, 2, call.count);
    sum = other;
  };
  if (in_pair) {
    char* const slot = slots + steps * room;
    group.Wait(group.Receive(place + 1, tag.Step(kGive), slot, bytes));
    add(slot, /*is_lower=*/false);
  }
  for (uint32_t k = 0; k < steps; k++) {
    const uint32_t other = own ^ 1u << k;
    sent.push_back(group.Send(place_of(other), tag.Step(kStep + k), sum, bytes));
    group.Wait(received[k]);
    add(slots + k * room, other < own);
    KUNGFU_FAULT_POINT("between two doublings");
  }
  if (in_pair) sent.push_back(group.Send(place + 1, tag.Step(kResult), sum, bytes));
  group.WaitAll(sent);
  Copy(call.out, sum, bytes);
}

void Doubling::ReduceAlone(kf_dtype dtype, kf_op op, std::vector<const void*> parts, void* out, size_t count) {
  const size_t bytes = count * SizeOf(dtype), n = parts.size();
  const ReduceFn reduce = ReductionFor(dtype, op);
  std::vector<char> sums(n * bytes);
  const auto add = [&](size_t into, size_t lower, size_t upper) {
    const void* const sources[] = {parts[lower], parts[upper]};
    reduce(sums.data() + into * bytes, sources, 2, count);
    parts[into] = sums.data() + into * bytes;
  };
  const size_t power = size_t{1} << Doublings(static_cast<uint32_t>(n));
  const size_t pairs = n - power;
  for (size_t p = 0; p < pairs; p++) add(p, 2 * p, 2 * p + 1);
  std::move(parts.begin() + static_cast<std::ptrdiff_t>(2 * pairs), parts.end(),
            parts.begin() + static_cast<std::ptrdiff_t>(pairs));
  for (size_t half = 1; half < power; half *= 2) {
    for (size_t p = 0; p < power; p += 2 * half) add(p, p, p + half);
  }
  Copy(out, parts[0], bytes);
}

}  // namespace kungfu::hosts
