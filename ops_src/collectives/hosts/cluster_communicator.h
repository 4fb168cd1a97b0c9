// The communicator of one rank in a cluster with several hosts.
#ifndef KUNGFU_COLLECTIVES_HOSTS_CLUSTER_COMMUNICATOR_H_
#define KUNGFU_COLLECTIVES_HOSTS_CLUSTER_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "collectives/communicator.h"
#include "collectives/host/host_communicator.h"
#include "collectives/hosts/cluster_control_block.h"
#include "collectives/hosts/protocol.h"
#include "collectives/settle.h"

namespace kungfu {

// A rank has no connection to other hosts. It sends its contribution to its host's transport
// (hosts/transport.h), which is a member of the host's segment, and gets the result from this
// transport. transport.h describes the protocol, and why all ranks reach the same outcome.
class ClusterCommunicator final : public Communicator {
 public:
  // Creates the communicator of rank `rank` and announces the rank. Assemble() waits for the other ranks. `local` is
  // the segment of this rank's host. `control_segment` is the segment with the control block of all ranks. `requests`
  // is a socket to the transport, from Transport::Connect. The caller still owns this socket.
  ClusterCommunicator(const std::shared_ptr<shm::Segment>& local, const std::shared_ptr<shm::Segment>& control_segment,
                      int requests, const hosts::Places& places, uint32_t rank, const std::string& address,
                      bool has_state, const CommunicatorOptions& options);
  ~ClusterCommunicator() override;

  // Waits until every running rank has announced itself. See HostCommunicator::Assemble.
  void Assemble();

  uint32_t Run(const Operation& operation) override;
  uint32_t RunAll(const Operation* operations, size_t num_operations) override;
  uint32_t Settle(const Operation* operations, uint32_t* generations, size_t num_operations) override;
  std::optional<uint32_t> RunRenewable(Renewable& operation, uint32_t from_generation) override;

  void SetSources(Members sources) override;

  void Close(kf_status status, const std::string& reason) override;
  void GiveUp(const Error& error) override;

 private:
  class Renewal;
  class Turn;
  // The state of this rank's operations with one name. While an operation is in progress, the other
  // ranks may be waiting until this rank contributes again.
  struct Name {
    std::mutex busy;  // held by the thread that runs the operation
    // `busy` guards these members:
    bool under_way = false;
    std::optional<uint32_t> told;  // the latest generation whose planes the transport has received
  };

  ControlBlock* control() const override { return &control_; }

  template <typename Body>
  void OrGiveUp(const Body& body);
  uint32_t RunShared(const Operation& operation, uint32_t from_generation);
  uint32_t RunInSlices(const Operation& operation, uint32_t from_generation);
  RunFromGeneration RunsShared();
  template <typename OperationIn>
  std::optional<uint32_t> RunGenerations(uint32_t from_generation, const OperationIn& operation_in);
  std::shared_ptr<Name> Find(const std::string& name);
  void Forget(const std::string& name);
  using Brought = HostCommunicator::Pinned;
  Brought Bring(const Operation& operation, uint32_t generation, bool more_follow = false);
  std::optional<uint32_t> Hear(const Operation& operation, Brought& brought);
  void Tell(const Operation& operation, uint32_t generation, bool renewal, bool more_follow = false) const;
  hosts::CommitAndResult HearCommit(const Operation& operation);
  [[noreturn]] void Fail(const Operation& operation, const hosts::Commit& commit);
  std::string BehindTheTransport(const Operation& part);
  void TakeResult(const Operation& operation);
  void Check(const Operation& operation) const;
  uint32_t AwaitLocalFailures(uint32_t generation) const;
  uint32_t AwaitGenerationWithout(uint32_t local_generation) const;

  const hosts::Places places_;
  const uint32_t host_;
  const uint32_t transport_;  // the transport's rank in the host's segment
  const size_t slice_bytes_;
  mutable hosts::ClusterControlBlock control_;
  HostCommunicator local_;
  const shm::SegmentControlBlock local_control_;
  int requests_ = -1;
  std::mutex asking_;
  uint64_t questions_ = 0;  // guarded by asking_
  std::mutex mutex_;
  std::shared_ptr<const Members> sources_;                        // null if there are no sources; guarded by mutex_
  std::unordered_map<std::string, std::shared_ptr<Name>> names_;  // names in use; guarded by mutex_
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_HOSTS_CLUSTER_COMMUNICATOR_H_
