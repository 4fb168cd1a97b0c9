// Operations between hosts that only copy data, so the bits are equal at all hosts. Callers must follow the rules of
// Algorithm::Run (algorithm.h).
#ifndef KUNGFU_COLLECTIVES_HOSTS_COPIES_H_
#define KUNGFU_COLLECTIVES_HOSTS_COPIES_H_

#include <cstddef>
#include <cstdint>

#include "collectives/hosts/group.h"
#include "collectives/hosts/tree_shape.h"

namespace kungfu::hosts {

// Copies `data` of the host at place `root` to all hosts.
void Broadcast(const Group& group, const tcp::Tag& tag, Shape shape, uint32_t root, void* data, size_t bytes);

// Sets `out` to the rows of all hosts, `bytes` each, in the order of the hosts. Each host sends its row to each other
// host, so rows should be small.
void AllGather(const Group& group, const tcp::Tag& tag, const void* row, void* out, size_t bytes);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_COPIES_H_
