// Divides the work of summing an operation's planes among the hosts.
#ifndef KUNGFU_COLLECTIVES_HOSTS_PLANE_SPLIT_H_
#define KUNGFU_COLLECTIVES_HOSTS_PLANE_SPLIT_H_

#include <cstdint>
#include <vector>

#include "collectives/hosts/protocol.h"
#include "collectives/planes.h"

namespace kungfu::hosts {

// A host computes all additions that need only its own planes. Each *node* is the result of a part
// of the operation's program that uses only planes of one host. Nodes are as large as possible, and
// only nodes are sent over the network. Then all hosts add up the nodes with the rest of the
// program. Each addition belongs to the original program, and has the same two operands. So the
// bits of the result are equal to those of the whole program on one host.
struct PlaneSplit {
  // The program of each node, indexed by host and then by node. The planes have the same numbers as
  // in the whole operation.
  std::vector<std::vector<std::vector<int32_t>>> nodes;
  // The program that adds up the nodes of all hosts. Nodes are numbered consecutively in the order
  // of the hosts. The divisor is the divisor of the whole operation.
  Planes rest;
};

PlaneSplit SplitPlanes(const Planes& planes, const Places& places);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_PLANE_SPLIT_H_
