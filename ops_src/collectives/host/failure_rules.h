// Determines which ranks have failed, how a failure affects an operation, and when a wait can't
// succeed any more.
#ifndef KUNGFU_COLLECTIVES_HOST_FAILURE_RULES_H_
#define KUNGFU_COLLECTIVES_HOST_FAILURE_RULES_H_

#include <chrono>
#include <string>

#include "base/error.h"
#include "base/run_time.h"
#include "collectives/host/endpoint.h"
#include "collectives/host/flight.h"

namespace kungfu::host {

// Thrown if an operation can't be finished because a rank failed. The operation must be repeated
// without that rank.
struct Unfinished {};

// Thrown if this rank has been declared failed although its process is running.
struct Expelled : Error {
  using Error::Error;
};

// Thrown if the operation failed in the same way on all ranks. The communicator stays usable.
struct FailedEverywhere : Error {
  using Error::Error;
};

// Checks whether an operation can continue. The functions throw if the caller must leave the
// operation. Thread-safe.
class FailureRules {
 public:
  explicit FailureRules(const Endpoint& self) : self_(self) {}

  bool HasFailed(uint32_t rank) const { return self_.control.HasFailed(rank); }
  // Throws Unfinished if a rank failed before its contribution to this operation was finished.
  // Throws Expelled if this rank itself has been declared failed.
  void CheckFailures(const Flight& flight) const;
  // Advances one of this rank's counters to `next`. Throws Expelled if the launcher has fenced the
  // counter.
  void Publish(shm::Counter& word, uint32_t next) const {
    if (!word.Advance(next)) ThrowExpelled();
  }
  [[noreturn]] void ThrowExpelled() const;

  void ThrowIfClosed() const;
  // Throws if a wait can't succeed any more, or if an operation mustn't begin. The error message
  // begins with `title`.
  void ThrowIfPointless(const std::string& title) const;
  void ThrowIfPointless(const Flight& flight) const;
  // Throws if `counter` of `peer` can't reach `target` any more, for example because `peer` has
  // left before it contributed.
  void ThrowIfPointless(const shm::Counter& counter, uint32_t target, uint32_t peer, const Flight& flight) const;
  // Throws if a wait for the channel table's lock can't succeed any more. `waited` is the time for
  // which this rank has waited.
  void ThrowIfPointless(const Operation& operation, RunTime::Clock::duration waited) const;
  void ThrowIfLost(const std::string& title) const;

 private:
  bool HasFinished(uint32_t rank, const Flight& flight) const;
  void ThrowIfGivenUp() const;

  const Endpoint& self_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_FAILURE_RULES_H_
