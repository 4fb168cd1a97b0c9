// Exchanges data between the members of an operation on one host.
#ifndef KUNGFU_COLLECTIVES_HOST_EXCHANGE_H_
#define KUNGFU_COLLECTIVES_HOST_EXCHANGE_H_

#include <cstdint>

#include "collectives/host/endpoint.h"
#include "collectives/host/failure_rules.h"
#include "collectives/host/flight.h"
#include "collectives/host/staging_buffers.h"
#include "collectives/host/staging_choice.h"
#include "collectives/host/waiting.h"

namespace kungfu::host {

// Thread-safe.
class Exchange {
 public:
  Exchange(const Endpoint& self, const FailureRules& rules, const Waiting& waiting,
           const StagingBuffers& staging_buffers);

  // Tries once to run the operation with its current members. Throws Unfinished if a member failed
  // before its contribution was finished.
  void Run(Flight& flight);

 private:
  void RunAtOnce(Flight& flight);
  void RunPipelined(Flight& flight, StagingTurns& turns);
  void RunSplit(Flight& flight, StagingTurns& turns);
  shm::Mailbox& FillMailbox(const Flight& flight);
  void End(const Flight& flight) const;
  void AwaitRoom(Flight& flight, uint32_t chunk);
  void StageChunk(Flight& flight, StagingTurns& turns, uint32_t chunk, Cursor& input);
  void AwaitMailboxes(Flight& flight);
  [[noreturn]] void ReportMismatch(Flight& flight);

  const Endpoint& self_;
  const FailureRules& rules_;
  const Waiting& waiting_;
  const StagingBuffers& staging_buffers_;
  const uint32_t ahead_;  // number of chunks that are staged ahead of the chunk that is being read
  StagingChoice staging_choice_;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_EXCHANGE_H_
