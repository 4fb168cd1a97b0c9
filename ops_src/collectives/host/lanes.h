// The lanes of the segment, in which operations stage what is too large for a mailbox.
#ifndef KUNGFU_COLLECTIVES_HOST_LANES_H_
#define KUNGFU_COLLECTIVES_HOST_LANES_H_

#include <cstdint>

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
  void Leave(const Flight& flight, bool failed) const;

 private:
  uint32_t Pick(Flight& flight) const;
  uint64_t Take() const;
  void GiveBack(uint64_t bit) const;
  void WakeWaiters() const;

  const Endpoint& self_;
  const FailureRules& rules_;
  const Waiting& waiting_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_LANES_H_
