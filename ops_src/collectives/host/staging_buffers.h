// The segment's staging buffers, which hold data that is too large for a mailbox.
#ifndef KUNGFU_COLLECTIVES_HOST_STAGING_BUFFERS_H_
#define KUNGFU_COLLECTIVES_HOST_STAGING_BUFFERS_H_

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
class StagingBuffers {
 public:
  StagingBuffers(const Endpoint& self, const FailureRules& rules, const Waiting& waiting)
      : self_(self), rules_(rules), waiting_(waiting) {}

  // Binds a staging buffer to the operation. Waits if all staging buffers are in use.
  void Bind(Flight& flight) const;
  // Records that this rank has finished the operation. Call this function even if the operation
  // used no staging buffer. Set `failed` if the counters of the staging buffer must be reset before
  // their next use.
  void Leave(const Flight& flight, bool failed) const {
    Leave(flight.channel, flight.sequence, flight.members.size(), failed);
  }
  // Records that this rank has finished operation number `sequence` in channel `channel`. The
  // operation has `members` members.
  void Leave(uint32_t channel, uint32_t sequence, size_t members, bool failed) const;

 private:
  struct Range {
    uint32_t first, count;
  };
  static constexpr Range kOrdinary{0, shm::kStagingBuffers}, kPinned{shm::kStagingBuffers, shm::kPinnedBuffers};

  static bool Pins(const Flight& flight);
  uint32_t Pick(Flight& flight) const;
  std::atomic<uint64_t>& InUse(Range range) const;
  std::optional<uint32_t> Take(Range range) const;
  void GiveBack(uint32_t staging_buffer) const;
  void WakeWaiters() const;

  const Endpoint& self_;
  const FailureRules& rules_;
  const Waiting& waiting_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_STAGING_BUFFERS_H_
