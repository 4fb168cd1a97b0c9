// Operations between hosts, of which each brings one part: over messages, on the caller's thread.
//
// Every host of the group calls the same with the same tag, which no other operation of the epoch has, and the same
// sizes. Operations under different tags run side by side, and in any order. They throw what Mesh's calls throw. When a
// host is lost, those throw who wait for it; some may have succeeded; and some wait for a host that has thrown, until
// they are told of the loss (Mesh::Cancel) or their deadlines pass. Who throws has nothing under way any more, and part
// of the result in its output.
#ifndef KUNGFU_COLLECTIVES_HOSTS_OPERATIONS_H_
#define KUNGFU_COLLECTIVES_HOSTS_OPERATIONS_H_

#include <cstddef>
#include <vector>

#include "collectives/hosts/group.h"
#include "collectives/hosts/strategy.h"

namespace kungfu::hosts {

// out[i] = in[i] of all hosts, reduced; in == out is in place. A mean is refused: it is a sum, divided once at the end,
// by whoever knows by how much. The bits are the same at every host: a function of the inputs, the hosts' order, their
// number, `count` and the way, which is the same at all of them. 16-bit floats are rounded whenever two parts come
// together.
void AllReduce(const Group& group, const tcp::Tag& tag, const Way& way, kf_dtype dtype, kf_op op, const void* in,
               void* out, size_t count);

void AllReduceByDoubling(const Group& group, const tcp::Tag& tag, kf_dtype dtype, kf_op op, const void* in, void* out,
                         size_t count);
// What that gives where these are what the hosts bring, by place; by one that has them all. `out` is none of them.
void ReduceAsByDoubling(kf_dtype dtype, kf_op op, std::vector<const void*> parts, void* out, size_t count);
void AllReduceByRing(const Group& group, const tcp::Tag& tag, kf_dtype dtype, kf_op op, const void* in, void* out,
                     size_t count);
// `way` is one of trees.
void AllReduceByTrees(const Group& group, const tcp::Tag& tag, const Way& way, kf_dtype dtype, kf_op op, const void* in,
                      void* out, size_t count);

// `data` of the host at place `root` is copied to all.
void Broadcast(const Group& group, const tcp::Tag& tag, Shape shape, uint32_t root, void* data, size_t bytes);

// out = the rows of all hosts, of `bytes` each, in their order. Each sends its own to every other one: for small rows.
void AllGather(const Group& group, const tcp::Tag& tag, const void* row, void* out, size_t bytes);

// Pieces that may arrive while one is reduced: memory that stays in a core's cache.
inline constexpr size_t kWindow = 8;

// Receives of an operation that are posted before they are waited for, at most: the other side, which may not have come
// to them yet, keeps a note of each, and takes whoever has it keep too many for no host (tcp::kMostEarly).
inline constexpr size_t kAhead = 256;

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_OPERATIONS_H_
