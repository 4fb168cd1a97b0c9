// The lanes of the segment, in which operations stage what is too large for a mailbox.
#ifndef KUNGFU_COLLECTIVES_HOST_LANES_H_
#define KUNGFU_COLLECTIVES_HOST_LANES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "collectives/host/endpoint.h"
#include "collectives/host/failure_rules.h"
#include "collectives/host/flight.h"
#include "collectives/host/waiting.h"

namespace kungfu::host {

// Thread-safe.
class Lanes {
 public:
  Lanes(const Endpoint& self, const FailureRules& rules, const Waiting& waiting)
      : self_(self), rules_(rules), waiting_(waiting) {}

  // Gives the operation its lane; waits where all are in use.
  void Bind(Flight& flight) const;
  // This rank is through with the operation, which may have needed no lane. `failed`: the words of the lane are not as
  // at its beginning.
  void Leave(const Flight& flight, bool failed) const {
    Leave(flight.channel, flight.sequence, flight.members.size(), failed);
  }
  // Likewise: with the operation of that number in that channel, which has so many members.
  void Leave(uint32_t channel, uint32_t sequence, size_t members, bool failed) const;

 private:
  struct Range {
    uint32_t first, count;
  };
  static constexpr Range kOrdinary{0, shm::kLanes}, kKept{shm::kLanes, shm::kKeptLanes};

  static bool Keeps(const Flight& flight);
  uint32_t Pick(Flight& flight) const;
  std::atomic<uint64_t>& InUse(Range range) const;
  std::optional<uint32_t> Take(Range range) const;
  void GiveBack(uint32_t lane) const;
  void WakeWaiters() const;

  const Endpoint& self_;
  const FailureRules& rules_;
  const Waiting& waiting_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_LANES_H_
