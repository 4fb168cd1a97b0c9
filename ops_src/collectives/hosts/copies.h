// Operations between hosts that only copy, so that their bits are the same everywhere. Their callers: see algorithm.h.
#ifndef KUNGFU_COLLECTIVES_HOSTS_COPIES_H_
#define KUNGFU_COLLECTIVES_HOSTS_COPIES_H_

#include <cstddef>
#include <cstdint>

#include "collectives/hosts/group.h"
#include "collectives/hosts/tree_shape.h"

namespace kungfu::hosts {

// `data` of the host at place `root` is copied to all.
void Broadcast(const Group& group, const tcp::Tag& tag, Shape shape, uint32_t root, void* data, size_t bytes);

// out = the rows of all hosts, of `bytes` each, in their order. Each sends its own to every other one: for small rows.
void AllGather(const Group& group, const tcp::Tag& tag, const void* row, void* out, size_t bytes);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_COPIES_H_
