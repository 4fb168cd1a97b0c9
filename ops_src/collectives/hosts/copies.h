// Operations between hosts that only copy data, so that the bits are equal on all hosts. Callers
// must follow the rules of Algorithm::Run (algorithm.h).
#ifndef KUNGFU_COLLECTIVES_HOSTS_COPIES_H_
#define KUNGFU_COLLECTIVES_HOSTS_COPIES_H_

#include <cstddef>
#include <cstdint>

#include "collectives/hosts/group.h"
#include "collectives/hosts/tree_shape.h"

namespace kungfu::hosts {

// Copies the data of the host at place `root` to `data` on all hosts.
void Broadcast(const Group& group, const tcp::Tag& tag, Shape shape, uint32_t root, void* data, size_t bytes);

// Fills `out` with the rows of all hosts, in the order of the hosts. Each row has `bytes` bytes.
// Each host sends its row to every other host, so rows should be small.
void AllGather(const Group& group, const tcp::Tag& tag, const void* row, void* out, size_t bytes);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_COPIES_H_
