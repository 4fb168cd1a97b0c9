// Collectives between the processes of one host, which share a memory segment.
//
// Each rank writes only to its own mailboxes, its own `ready`, `reduced` and `done` counters, and
// its own buffers. There are two exceptions. Once per operation, one rank sets the channel's
// staging word by compare-and-swap. All ranks increment the shared counter `left`. Numbered
// invariants in these files show why this works:
//
//   1-3        exchange.cc             posts, pipelines and splits; why there are no circular waits
//   4, 10, 12  staging_buffers.cc      staging buffers, buffers of failed members, pinned buffers
//   5, 6       failure_rules.cc        why all survivors read the same words of a failed rank
//   7-9        host_communicator.cc    how operations are repeated in a later generation
//   11         failure_rules.cc        a rank that is expelled while its process is running
//
// These files have no numbered invariants: waiting.cc (spinning, sleeping and deadlines) and
// channel_table.h (names).
//
// tests/cpp/recovery_test.cc kills a rank at each KUNGFU_FAULT_POINT in these files and compares
// the results of the survivors.
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
  // An operation that this rank has ended, and the operation's staging buffer if this buffer is
  // pinned (see invariant 12 in staging_buffers.cc). This object must be destroyed before the
  // communicator, and before the next operation with the same name begins.
  class Pinned {
   public:
    // Returns the generation in which the operation ended.
    uint32_t generation() const { return generation_; }
    // Returns true if a staging buffer is pinned. If not, LetGo does nothing.
    bool HasBuffer() const { return buffer_ != nullptr; }
    // Returns a rank's buffers, which have space for everything that one rank contributes.
    char* Of(uint32_t rank) const { return buffer_->self.segment.buffer(buffer_->number, rank, 0); }
    // On the root, returns the only rank that has contributed, whose buffers contain the result.
    // Returns -1 if the output contains the result.
    int lone() const { return buffer_ == nullptr ? -1 : buffer_->lone; }
    void LetGo() { buffer_ = nullptr; }

   private:
    friend HostCommunicator;

    // The destructor records that this rank has left the operation.
    struct Buffer {
      ~Buffer();

      const host::Endpoint& self;
      const host::StagingBuffers& staging_buffers;
      const std::shared_ptr<host::BoundName> name;  // this reference keeps the channel bound
      const uint32_t channel, sequence, number;
      const size_t members;
      const int lone;
    };

    uint32_t generation_ = 0;
    std::unique_ptr<const Buffer> buffer_;
  };

  // Creates the communicator of rank `rank` in `segment`, and announces the rank. Assemble() waits
  // for the other ranks. `address` identifies this rank in messages. shm::SegmentControlBlock
  // describes `numbers`.
  HostCommunicator(std::shared_ptr<shm::Segment> segment, uint32_t rank, const std::string& address, bool has_state,
                   const CommunicatorOptions& options, std::vector<uint32_t> numbers = {});

  // Waits until every running rank has announced itself. An error has the same effects as in an
  // operation.
  void Assemble();

  uint32_t Run(const Operation& operation) override;
  uint32_t RunAll(const Operation* operations, size_t num_operations) override;
  uint32_t Settle(const Operation* operations, uint32_t* generations, size_t num_operations) override;
  std::optional<uint32_t> RunRenewable(Renewable& operation, uint32_t from_generation) override;
  void GiveUp(const Error& error) override;
  void LookForDeadlock(bool stands_still, const std::string& place) override;

  // Does the same as Run, but starts in `from_generation`. RunFrom doesn't report the operation to
  // the observer or add it to the reduction log.
  uint32_t RunFrom(const Operation& operation, uint32_t from_generation);
  // Does the same as RunFrom, but may keep the staging buffer after the operation (pin it). This
  // requires that all members request it (pins_buffer) and that a buffer of this kind is free.
  Pinned RunPinned(const Operation& operation, uint32_t from_generation);
  // Copies the data in the pinned buffers of rank `from` to the operation's tensors.
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

  mutable host::Endpoint self_;  // all parts of the communicator use its control block
  const host::FailureRules rules_;
  const host::Waiting waiting_;
  const host::StagingBuffers staging_buffers_;
  host::Exchange exchange_;
  host::ChannelTable channels_;
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_HOST_HOST_COMMUNICATOR_H_
