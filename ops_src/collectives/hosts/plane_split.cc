#include "collectives/hosts/plane_split.h"

#include <utility>

#include "base/error.h"

namespace kungfu::hosts {
namespace {

// An intermediate result. It is computed either from planes of one host, or from nodes of several
// hosts.
struct Part {
  static constexpr uint32_t kSeveral = UINT32_MAX;

  uint32_t host = kSeveral;
  std::vector<int32_t> planes;                       // for a result from one host: its program
  std::vector<std::pair<uint32_t, uint32_t>> nodes;  // for a result from several hosts: (host, node), or kSum for an
                                                     // addition
};
constexpr std::pair<uint32_t, uint32_t> kSum{Part::kSeveral, 0};

}  // namespace

PlaneSplit SplitPlanes(const Planes& planes, const Places& places) {
  KUNGFU_CHECK(planes.of_rank.size() == places.ranks(), planes.of_rank.size(), " of ", places.ranks());
  std::vector<uint32_t> host_of_plane;
  for (uint32_t rank = 0; rank < places.ranks(); rank++) {
    host_of_plane.insert(host_of_plane.end(), planes.of_rank[rank], places.HostOf(rank));
  }
  PlaneSplit split;
  split.nodes.resize(places.hosts());
  const auto finish = [&](Part& part) {  // called when the part is added to a part of another host
    if (part.host == Part::kSeveral) return;
    std::vector<std::vector<int32_t>>& there = split.nodes[part.host];
    part.nodes = {{part.host, static_cast<uint32_t>(there.size())}};
    there.push_back(std::move(part.planes));
    part.host = Part::kSeveral;
  };
  std::vector<Part> stack;
  for (const int32_t step : planes.program) {
    if (step != Planes::kAdd) {
      stack.push_back({host_of_plane[static_cast<size_t>(step)], {step}, {}});
      continue;
    }
    Part right = std::move(stack.back());
    stack.pop_back();
    Part& left = stack.back();
    if (left.host != Part::kSeveral && left.host == right.host) {
      left.planes.insert(left.planes.end(), right.planes.begin(), right.planes.end());
      left.planes.push_back(Planes::kAdd);
      continue;
    }
    finish(left);
    finish(right);
    left.nodes.insert(left.nodes.end(), right.nodes.begin(), right.nodes.end());
    left.nodes.push_back(kSum);
  }
  finish(stack.back());

  std::vector<int32_t> first(places.hosts());
  int32_t next = 0;
  for (uint32_t host = 0; host < places.hosts(); host++) {
    first[host] = next;
    next += static_cast<int32_t>(split.nodes[host].size());
    split.rest.of_rank.push_back(static_cast<uint32_t>(split.nodes[host].size()));
  }
  for (const auto& node : stack.back().nodes) {
    split.rest.program.push_back(node == kSum ? Planes::kAdd : first[node.first] + static_cast<int32_t>(node.second));
  }
  split.rest.divisor = planes.divisor;
  return split;
}

}  // namespace kungfu::hosts
