// The communicator of a process that kungfu-run didn't start, or that hasn't joined a cluster yet.
// Its cluster has one rank and no launcher.
#ifndef KUNGFU_COLLECTIVES_LONE_COMMUNICATOR_H_
#define KUNGFU_COLLECTIVES_LONE_COMMUNICATOR_H_

#include "collectives/communicator.h"

namespace kungfu {

// Runs an operation that has only one rank. For every kind of operation, the outputs are copies of
// the inputs. If the operation adds up planes (planes.h), the output is the sum of the planes,
// divided by Planes::divisor.
void RunAlone(const Operation& operation);

class LoneCommunicator final : public Communicator {
 public:
  explicit LoneCommunicator(uint64_t cluster_version = 0) : Communicator(0, 1, cluster_version) {}

  uint32_t Run(const Operation& operation) override;
  uint32_t RunAll(const Operation* operations, size_t num_operations) override;
  std::optional<uint32_t> RunRenewable(Renewable& operation, uint32_t from_generation) override;
  uint32_t Settle(const Operation*, uint32_t*, size_t) override { return 0; }

 private:
  ControlBlock* control() const override { return nullptr; }
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_LONE_COMMUNICATOR_H_
