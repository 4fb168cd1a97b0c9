// Which ranks have failed, what that means for an operation, and when a wait has become pointless.
#ifndef KUNGFU_COLLECTIVES_HOST_FAILURE_RULES_H_
#define KUNGFU_COLLECTIVES_HOST_FAILURE_RULES_H_

#include <chrono>
#include <string>

#include "base/error.h"
#include "base/run_time.h"
#include "collectives/host/endpoint.h"
#include "collectives/host/flight.h"

namespace kungfu::host {

// Thrown if an operation can't be finished without a failed rank, and has to be repeated.
struct Unfinished {};

// This rank is out, though its process lives.
struct Expelled : Error {
  using Error::Error;
};

// The operation failed at all ranks alike, and the communicator goes on.
struct FailedEverywhere : Error {
  using Error::Error;
};

// Thread-safe; throws what makes the caller leave what it is at.
class FailureRules {
 public:
  explicit FailureRules(const Endpoint& self) : self_(self) {}

  bool HasFailed(uint32_t rank) const { return self_.control.HasFailed(rank); }
  // Throws Unfinished if a rank failed in, or before, this operation, and Expelled if it is this rank.
  void CheckFailures(const Flight& flight) const;
  // A step of one of this rank's words. Throws Expelled if it has been fenced.
  void Publish(shm::Counter& word, uint32_t next) const {
    if (!word.Advance(next)) ThrowExpelled();
  }
  [[noreturn]] void ThrowExpelled() const;

  void ThrowIfClosed() const;
  // All that can end a wait, or a beginning, before what is awaited comes; `title` begins the message.
  void ThrowIfPointless(const std::string& title) const;
  void ThrowIfPointless(const Flight& flight) const;
  // ... and that `peer`, whose `counter` is awaited, has left before it contributed.
  void ThrowIfPointless(const shm::Counter& counter, uint32_t target, uint32_t peer, const Flight& flight) const;
  // The same for the table of names, which another rank has kept locked for `waited`.
  void ThrowIfPointless(const Operation& operation, RunTime::Clock::duration waited) const;
  void ThrowIfLost(const std::string& title) const;

 private:
  bool HasFinished(uint32_t rank, const Flight& flight) const;
  void ThrowIfGivenUp() const;

  const Endpoint& self_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_FAILURE_RULES_H_
