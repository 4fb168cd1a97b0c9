// The collectives between the processes of a host, over the segment that they share.
//
// Each rank writes only its own mailboxes, its own ready, reduced and done counters and its own
// buffers. The staging word of a channel is set once per operation by compare-and-swap. All ranks
// raise `left`. The argument why that works continues, by number, beside the code:
//
//   1-3        exchange.cc             posts, pipelines, splits; no circle of waits
//   4, 10, 12  staging_buffers.cc      staging; buffers of failed members; pinned buffers
//   5, 6       failure_rules.cc        the words of a failed rank, read alike by all survivors
//   7-9        host_communicator.cc    repetition: generations
//   11         failure_rules.cc        a rank that is expelled while it lives
//              waiting.cc              spinning, sleeping, deadlines
//              channel_table.h         names
//
// tests/cpp/recovery_test.cc kills a rank at each KUNGFU_FAULT_POINT there and compares the results
// of the survivors.
#ifndef KUNGFU_COLLECTIVES_HOST_HOST_COMMUNICATOR_H_
#define KUNGFU_COLLECTIVES_HOST_HOST_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/communicator.h"
#include "collectives/host/channel_table.h"
#include "collectives/host/endpoint.h"
#include "collectives/host/exchange.h"
#include "collectives/host/failure_rules.h"
#include "collectives/host/staging_buffers.h"
#include "collectives/host/waiting.h"
#include "collectives/settle.h"
#include "transport/shm/segment.h"

namespace kungfu {

class HostCommunicator final : public Communicator {
 public:
  // An operation that this rank has ended, and perhaps its staging buffer: see staging_buffers.cc, 12. Not beyond the
  // communicator, and not beyond the beginning of the next operation of its name.
  class Pinned {
   public:
    // In which it ended.
    uint32_t generation() const { return generation_; }
    // Whether a buffer is pinned. If not, there is nothing to let go of.
    bool HasBuffer() const { return buffer_ != nullptr; }
    // The buffers of a rank, which have room for all that one brings.
    char* Of(uint32_t rank) const { return buffer_->self.segment.buffer(buffer_->number, rank, 0); }
    // At the root: the one rank that has brought something, so that the output has nothing. -1: the output has the
    // result.
    int lone() const { return buffer_ == nullptr ? -1 : buffer_->lone; }
    void LetGo() { buffer_ = nullptr; }

   private:
    friend HostCommunicator;

    // Left when it is destroyed.
    struct Buffer {
      ~Buffer();

      const host::Endpoint& self;
      const host::StagingBuffers& staging_buffers;
      const std::shared_ptr<host::BoundName> name;  // so that the channel stays bound
      const uint32_t channel, sequence, number;
      const size_t members;
      const int lone;
    };

    uint32_t generation_ = 0;
    std::unique_ptr<const Buffer> buffer_;
  };

  // Rank `rank` of `segment`. Announces itself; Assemble() waits for the others. `address` names this rank in messages.
  // `numbers`: see shm::SegmentControlBlock.
  HostCommunicator(std::shared_ptr<shm::Segment> segment, uint32_t rank, const std::string& address, bool has_state,
                   const CommunicatorOptions& options, std::vector<uint32_t> numbers = {});

  // Waits until every rank that lives has announced itself. Fails as an operation does: a rank that is interrupted in
  // it is out alone if the others recover, and so on.
  void Assemble();

  uint32_t Run(const Operation& operation) override;
  uint32_t RunAll(const Operation* operations, size_t num_operations) override;
  uint32_t Settle(const Operation* operations, uint32_t* generations, size_t num_operations) override;
  std::optional<uint32_t> RunRenewable(Renewable& operation, uint32_t from_generation) override;
  void GiveUp(const Error& error) override;
  void LookForDeadlock(bool stands_still, const std::string& place) override;

  // For what is built of these operations (collectives/hosts): as Run, but from this generation on, and neither
  // observed nor noted.
  uint32_t RunFrom(const Operation& operation, uint32_t from_generation);
  // Likewise, and keeps the staging buffer if the operation says so, all members do, and a pinned one is free.
  Pinned RunPinned(const Operation& operation, uint32_t from_generation);
  // Of a pinned buffer: what `from` has put into its buffers, into the operation's tensors.
  void Read(const Pinned& pinned, uint32_t from, const Operation& operation) const;

 private:
  ControlBlock* control() const override { return &self_.control; }

  void Check(const Operation& operation) const;
  template <typename Body>
  void OrGiveUp(const Body& body);
  void AwaitMembers();
  uint32_t RunShared(const Operation& operation, uint32_t from_generation);
  template <typename OperationIn>
  std::optional<uint32_t> RunGenerations(uint32_t from_generation, const OperationIn& operation_in,
                                         Pinned* pinned = nullptr);
  RunFromGeneration RunsShared();
  void CountTraffic(const host::Flight& flight, uint64_t began) const;

  mutable host::Endpoint self_;  // whose control block all parts use
  const host::FailureRules rules_;
  const host::Waiting waiting_;
  const host::StagingBuffers staging_buffers_;
  host::Exchange exchange_;
  host::ChannelTable channels_;
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_HOST_HOST_COMMUNICATOR_H_
