// The hosts that contribute to an operation between hosts.
#ifndef KUNGFU_COLLECTIVES_HOSTS_GROUP_H_
#define KUNGFU_COLLECTIVES_HOSTS_GROUP_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collectives/operation.h"
#include "transport/tcp/mesh.h"

namespace kungfu::hosts {

// A group of hosts of a mesh, in one epoch. All hosts of the group have the same list of hosts. A
// host's place is its index in this list.
class Group {
 public:
  // `members` must be in ascending order and include this host. The mesh must outlive the group.
  Group(tcp::Mesh& mesh, uint64_t epoch, Members members) : mesh_(mesh), epoch_(epoch), members_(std::move(members)) {
    const auto self = std::lower_bound(members_.begin(), members_.end(), mesh.self());
    const bool sorted = std::adjacent_find(members_.begin(), members_.end(), std::greater_equal<>()) == members_.end();
    if (!sorted || self == members_.end() || *self != mesh.self() || members_.back() >= mesh.size()) {
      throw Error(KF_INVALID, Text("host ", mesh.self(), " of ", mesh.size(),
                                   ": the group's hosts are not in ascending order, or lack this host"));
    }
    place_ = static_cast<uint32_t>(self - members_.begin());
  }

  uint32_t size() const { return static_cast<uint32_t>(members_.size()); }
  uint32_t place() const { return place_; }  // the place of this host

  tcp::Mesh::Ticket Send(uint32_t to, const tcp::Tag& tag, const void* data, size_t bytes) const {
    return mesh_.Send(epoch_, members_[to], tag, data, bytes);
  }
  tcp::Mesh::Ticket Receive(uint32_t from, const tcp::Tag& tag, void* data, size_t bytes) const {
    return mesh_.Receive(epoch_, members_[from], tag, data, bytes);
  }
  void Wait(const tcp::Mesh::Ticket& ticket) const { mesh_.Wait(ticket); }
  void WaitAll(const std::vector<tcp::Mesh::Ticket>& tickets) const {
    for (const auto& ticket : tickets) Wait(ticket);
  }

 private:
  tcp::Mesh& mesh_;
  const uint64_t epoch_;
  const Members members_;
  uint32_t place_ = 0;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_GROUP_H_
