// The collectives between the processes of a host, over the segment that they share.
//
// Words, and who writes them: each rank writes only its own mailboxes, its own ready, reduced and done counters and its
// own buffers; the lane word of a channel is set once per operation by compare-and-swap; `left` is counted up by
// everyone. The argument why that works goes on, by number, beside the code that it argues for:
//
//   1-3   exchange.cc             posts, pipelines, splits; nobody waits in a circle
//   4, 10, 12 lanes.cc            where operations stage, what becomes of a lane whose member died, and lanes that
//                                 are kept
//   5, 6  failure_rules.cc        what a dead rank's words say, and to all survivors the same
//   7-9   host_communicator.cc    doing it again: generations
//   11    failure_rules.cc        a rank that is expelled while it lives
//         waiting.cc              spinning, sleeping, deadlines
//         channel_table.h         names
//
// tests/cpp/recovery_test.cc kills a rank at each KUNGFU_FAULT_POINT there and looks what the others have.
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
#include "collectives/host/lanes.h"
#include "collectives/host/waiting.h"
#include "collectives/settle.h"
#include "transport/shm/segment.h"

namespace kungfu {

class HostCommunicator final : public Communicator {
 public:
  // An operation that this rank has ended, and perhaps its lane: see lanes.cc, 12. Not beyond the communicator, and
  // not beyond the beginning of the next operation of its name.
  class Kept {
   public:
    // In which it ended.
    uint32_t generation() const { return generation_; }
    // Whether the lane is kept; else there is nothing to let go of.
    bool HasLane() const { return lane_ != nullptr; }
    // The buffers of a rank, which have room for all that one brings.
    char* Of(uint32_t rank) const { return lane_->self.segment.buffer(lane_->number, rank, 0); }
    // At the root: where one rank alone has brought something, and hence the output has nothing. -1: it is in there.
    int lone() const { return lane_ == nullptr ? -1 : lane_->lone; }
    void LetGo() { lane_ = nullptr; }

   private:
    friend HostCommunicator;

    // Left when it is destroyed.
    struct Lane {
      ~Lane();

      const host::Endpoint& self;
      const host::Lanes& lanes;
      const std::shared_ptr<host::BoundName> name;  // so that the channel stays bound
      const uint32_t channel, sequence, number;
      const size_t members;
      const int lone;
    };

    uint32_t generation_ = 0;
    std::unique_ptr<const Lane> lane_;
  };

  // Rank `rank` of `segment`. Announces itself; Assemble() waits for the others. `address` names this rank in messages.
  // `numbers`: see shm::Board.
  HostCommunicator(std::shared_ptr<shm::Segment> segment, uint32_t rank, const std::string& address, bool has_state,
                   const CommunicatorOptions& options, std::vector<uint32_t> numbers = {});

  // Waits until every rank that lives has announced itself. Fails as an operation does: who is interrupted in it is out
  // alone where the others recover, and so on.
  void Assemble();

  uint32_t Run(const Operation& operation) override;
  uint32_t RunAll(const Operation* operations, size_t num_operations) override;
  uint32_t Settle(const Operation* operations, uint32_t* generations, size_t num_operations) override;
  std::optional<uint32_t> RunRenewable(Renewable& operation, uint32_t from_generation) override;
  void GiveUp(const Error& error) override;
  void LookForDeadlock(bool stands_still, const std::string& place) override;

  // For what is built of these operations (collectives/hosts): as Run, but from this generation on, and nobody observes
  // it or takes note of it.
  uint32_t RunFrom(const Operation& operation, uint32_t from_generation);
  // Likewise, and keeps the lane where the operation says so, all members do, and there is one to keep.
  Kept RunKept(const Operation& operation, uint32_t from_generation);
  // Of a kept lane: what `from` has put into its buffers, into the operation's tensors.
  void Read(const Kept& kept, uint32_t from, const Operation& operation) const;

 private:
  ControlBoard* board() const override { return &self_.board; }

  void Check(const Operation& operation) const;
  template <typename Body>
  void OrGiveUp(const Body& body);
  void AwaitMembers();
  uint32_t RunShared(const Operation& operation, uint32_t from_generation);
  template <typename OperationIn>
  std::optional<uint32_t> RunGenerations(uint32_t from_generation, const OperationIn& operation_in,
                                         Kept* kept = nullptr);
  RunFromGeneration RunsShared();
  void CountTraffic(const host::Flight& flight, uint64_t began) const;

  mutable host::Endpoint self_;  // whose board is everybody's
  const host::FailureRules rules_;
  const host::Waiting waiting_;
  const host::Lanes lanes_;
  host::Exchange exchange_;
  host::ChannelTable channels_;
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_HOST_HOST_COMMUNICATOR_H_
