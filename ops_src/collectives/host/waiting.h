// How a rank waits for another one's word.
#ifndef KUNGFU_COLLECTIVES_HOST_WAITING_H_
#define KUNGFU_COLLECTIVES_HOST_WAITING_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "collectives/host/awaiting.h"
#include "collectives/host/deadlock.h"
#include "collectives/host/endpoint.h"
#include "collectives/host/failure_rules.h"
#include "collectives/host/flight.h"

namespace kungfu::host {

// Thread-safe.
class Waiting {
 public:
  Waiting(const Endpoint& self, const FailureRules& rules) : self_(self), rules_(rules), deadlocks_(self) {}

  // Waits until `counter` of `peer` has reached `target`; with `or_failed`, or `peer` has failed. Throws what
  // FailureRules throws, and CollectiveTimeoutError.
  void Await(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight, bool or_failed = false) const {
    if (!counter.Reached(target)) AwaitSlowly(counter, target, peer, flight, or_failed);
  }
  // Whether the deadline of `flight` has passed, which waits for busy ranks.
  bool DeadlinePassed(Flight& flight, std::chrono::steady_clock::time_point now) const;
  DeadlockWatch& deadlocks() const { return deadlocks_; }

 private:
  void AwaitSlowly(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight, bool or_failed) const;
  bool Spin(const shm::Counter& counter, uint32_t target, const Flight& flight) const;
  bool HasLaggardOn(int core, const Flight& flight) const;
  std::string NameOf(uint32_t peer, const Flight& flight) const;
  std::string Awaited(uint32_t peer, const Flight& flight) const;

  const Endpoint& self_;
  const FailureRules& rules_;
  mutable DeadlockWatch deadlocks_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_WAITING_H_
