// The planes of an operation, cut by hosts.
#ifndef KUNGFU_COLLECTIVES_HOSTS_PLANE_SPLIT_H_
#define KUNGFU_COLLECTIVES_HOSTS_PLANE_SPLIT_H_

#include <cstdint>
#include <vector>

#include "collectives/hosts/protocol.h"
#include "collectives/planes.h"

namespace kungfu::hosts {

// What a host can add up alone it does: each *node* is the result of a part of the operation's program that has this
// host's planes and no others, as large as possible. Only nodes go over the network. All hosts then add up the nodes,
// by what is left of the program. Each addition is one of the program's, with the same two operands, so the bits are
// those of the whole program at one place.
struct PlaneSplit {
  // By host, then by node: its program, in planes numbered as in the whole.
  std::vector<std::vector<std::vector<int32_t>>> nodes;
  // Over all nodes, numbered through in the order of the hosts; its divisor is the whole's.
  Planes rest;
};

PlaneSplit SplitPlanes(const Planes& planes, const Places& places);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_PLANE_SPLIT_H_
