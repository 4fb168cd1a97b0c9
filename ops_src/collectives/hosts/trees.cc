// An all-reduce that sums data up a tree of hosts, and sends the result down the tree. A host adds
// the data of its children to its own part, and sends the sum to its parent. The root gets the
// complete sum. If there are several trees, each has a different root and a part of the elements,
// so that no host does most of the work.
//
// Elements are divided into pieces. Each piece is one message. A host forwards a piece as soon as
// it has added its own part.
//
// All hosts get bit-identical results. Each element is added up in only one tree. Each host adds
// its children's parts in a fixed order. The root's sum is only copied.
//
// There is no circular wait. All hosts process the pieces in the same order. Each host sends all
// pieces up before it waits for a piece on its way down. On its way up, a piece comes from the
// host's children, which wait for no later piece before they send it. The leaves wait for no host.
// On its way down, a piece comes from the host's parent. No host waits for its own sends before the
// end.
//
// The sums are received directly into the output. The first kAhead of these receives are posted at
// the beginning. At that time, the output may still contain data that must be sent to the parent,
// or the inputs if the operation is in place. This is safe, because a sum includes this host's
// part. So this host has read its part from the output before the sum exists anywhere. The data of
// the children is received into a window of kWindow pieces, and is added from there.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "base/memory.h"
#include "collectives/dtype.h"
#include "collectives/hosts/algorithm.h"
#include "collectives/reduce.h"

namespace kungfu::hosts {
namespace {

struct TreePiece {
  size_t begin, count;  // range of the piece's elements
  const Branch* branch;
};

}  // namespace

Cost Trees::CostOf(uint32_t hosts, uint64_t bytes) const {
  uint64_t levels = 0;
  while (uint64_t{hosts} >> (levels + 1) != 0) levels++;
  return {2 * levels, bytes};
}

Branch Trees::BranchIn(uint32_t hosts, uint32_t root, uint32_t place) const {
  if (order_.empty()) return BranchOf(shape_, hosts, root, place);
  const auto at = std::find(order_.begin(), order_.end(), place);
  KUNGFU_CHECK(order_.size() == hosts && at != order_.end(), "host ", place, " is not in the order of the tree");
  Branch branch = BranchOf(shape_, hosts, root, static_cast<uint32_t>(at - order_.begin()));
  branch.parent = order_[branch.parent];
  for (uint32_t& child : branch.children) child = order_[child];
  return branch;
}

void Trees::RunInRange(const AllReduceCall& call) const {
  const Group& group = call.group;
  const tcp::Tag& tag = call.tag;
  const size_t count = call.count;
  const uint32_t n = group.size(), place = group.place(), trees = around_each_ ? n : 1;
  const size_t element = SizeOf(call.dtype), room = kPieceBytes / element;
  const auto* const input = static_cast<const char*>(call.in);
  auto* const output = static_cast<char*>(call.out);
  std::vector<Branch> branches;
  for (uint32_t root = 0; root < trees; root++) branches.push_back(BranchIn(n, root, place));
  std::vector<TreePiece> pieces;
  size_t begin = 0;
  for (uint32_t t = 0; t < trees; t++) {
    const size_t end = begin + count / trees + (t < count % trees ? 1 : 0);
    for (; begin < end; begin += pieces.back().count) {
      pieces.push_back({begin, std::min(room, end - begin), &branches[t]});
    }
  }
  const auto up_tag = [&](size_t k) { return tag.Step(k); };
  const auto down_tag = [&](size_t k) { return tag.Step(pieces.size() + k); };
  const auto bytes_of = [&](size_t k) { return pieces[k].count * element; };
  const auto at = [&](size_t k) { return output + pieces[k].begin * element; };
  const auto is_root = [&](size_t k) { return pieces[k].branch->parent == place; };

  thread_local Memory memory;  // reused, because new pages would cost as much as the copies into them
  char* const window = memory.Get(kWindow * kPieceBytes);
  // The tickets are declared after the memory, so that they are destroyed first.
  std::vector<tcp::Mesh::Ticket> parts_here, sums_here, sent;
  std::vector<std::pair<size_t, uint32_t>> parts;  // (piece, source) in the order in which the parts are added
  for (size_t k = 0; k < pieces.size(); k++) {
    for (const uint32_t child : pieces[k].branch->children) parts.emplace_back(k, child);
  }
  const auto slot = [&](size_t p) { return window + p % kWindow * kPieceBytes; };
  const auto receive_part = [&](size_t p) {
    const auto [k, child] = parts[p];
    parts_here.push_back(group.Receive(child, up_tag(k), slot(p), bytes_of(k)));
  };
  const auto send_down = [&](size_t k) {
    for (const uint32_t child : pieces[k].branch->children) {
      sent.push_back(group.Send(child, down_tag(k), at(k), bytes_of(k)));
    }
  };
  for (size_t p = 0; p < std::min(kWindow, parts.size()); p++) receive_part(p);
  const auto receive_sum = [&](size_t k) {
    sums_here.push_back(is_root(k) ? tcp::Mesh::Ticket()
                                   : group.Receive(pieces[k].branch->parent, down_tag(k), at(k), bytes_of(k)));
  };
  for (size_t k = 0; k < std::min(kAhead, pieces.size()); k++) receive_sum(k);
  const ReduceFn reduce = ReductionFor(call.dtype, call.op);
  for (size_t k = 0, p = 0; k < pieces.size(); k++) {
    const char* sum = input + pieces[k].begin * element;
    for (size_t c = 0; c < pieces[k].branch->children.size(); c++, p++) {
      group.Wait(parts_here[p]);
      const void* const sources[] = {sum, slot(p)};
      reduce(at(k), sources, 2, pieces[k].count);
      sum = at(k);
      if (p + kWindow < parts.size()) receive_part(p + kWindow);
    }
    KUNGFU_FAULT_POINT("before a piece goes on in its tree");
    if (is_root(k)) {
      send_down(k);
    } else {
      sent.push_back(group.Send(pieces[k].branch->parent, up_tag(k), sum, bytes_of(k)));
    }
  }
  for (size_t k = 0; k < pieces.size(); k++) {
    if (k + kAhead < pieces.size()) receive_sum(k + kAhead);
    if (is_root(k)) continue;
    group.Wait(sums_here[k]);
    send_down(k);
  }
  group.WaitAll(sent);
}

}  // namespace kungfu::hosts
