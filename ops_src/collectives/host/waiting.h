// Waits until another rank has advanced a counter.
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

  // Waits until `counter` of `peer` has reached `target`. With `or_failed`, the wait also ends if
  // `peer` has failed. Throws CollectiveTimeoutError, and the errors that FailureRules throws.
  void Await(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight, bool or_failed = false) const {
    if (!counter.Reached(target)) AwaitSlowly(counter, target, peer, flight, or_failed);
  }
  // Returns true if the deadline of `flight` has passed. The deadline is extended while a member is
  // busy with work that involves no other rank.
  bool DeadlinePassed(Flight& flight, std::chrono::steady_clock::time_point now) const;
  DeadlockWatch& deadlocks() const { return deadlocks_; }

 private:
  void AwaitSlowly(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight, bool or_failed) const;
  bool Spin(const shm::Counter& counter, uint32_t target, uint32_t peer, const Flight& flight) const;
  bool HasLaggardOn(int core, const Flight& flight) const;
  std::string NameOf(uint32_t peer, const Flight& flight) const;
  std::string Awaited(uint32_t peer, const Flight& flight) const;

  const Endpoint& self_;
  const FailureRules& rules_;
  mutable DeadlockWatch deadlocks_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_WAITING_H_
