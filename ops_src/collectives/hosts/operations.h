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

#include "collectives/hosts/group.h"

namespace kungfu::hosts {

// out[i] = in[i] of all hosts, reduced; in == out is in place. A mean is refused: it is a sum, divided once at the end,
// by whoever knows by how much. The bits are the same at every host: a function of the inputs, the hosts' order, their
// number and `count`. 16-bit floats are rounded whenever two parts come together.
void AllReduce(const Group& group, const tcp::Tag& tag, kf_dtype dtype, kf_op op, const void* in, void* out,
               size_t count);

// From this size on a ring, which sends less than the whole to each of many hosts and reduces while it sends; below it
// recursive doubling, which takes fewer steps.
inline constexpr size_t kRingBytes = 128 << 10;
void AllReduceByDoubling(const Group& group, const tcp::Tag& tag, kf_dtype dtype, kf_op op, const void* in, void* out,
                         size_t count);
void AllReduceByRing(const Group& group, const tcp::Tag& tag, kf_dtype dtype, kf_op op, const void* in, void* out,
                     size_t count);

// `data` of the host at place `root` is copied to all.
void Broadcast(const Group& group, const tcp::Tag& tag, uint32_t root, void* data, size_t bytes);

// out = the rows of all hosts, of `bytes` each, in their order. Each sends its own to every other one: for small rows.
void AllGather(const Group& group, const tcp::Tag& tag, const void* row, void* out, size_t bytes);

// What is sent, received and reduced at a time.
inline constexpr size_t kPieceBytes = 256 << 10;

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_OPERATIONS_H_
