// This process as a member of a cluster. A process has one peer, and one communicator for each cluster version in which
// it is a member.
#ifndef KUNGFU_RUNTIME_PEER_H_
#define KUNGFU_RUNTIME_PEER_H_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "collectives/communicator.h"
#include "collectives/hosts/protocol.h"
#include "runtime/background.h"
#include "runtime/heartbeat.h"
#include "store/peer_store.h"

namespace kungfu {

struct ResizeOutcome {
  bool changed = false;
  bool detached = false;
};

// Thread-safe. Each call uses the communicator that is current when the call begins. If the membership changes during
// an operation, the operation ends with StaleClusterError.
class Peer {
 public:
  // Changes the membership to this number of ranks and returns the outcome. Throws Error.
  using ResizeHandler = std::function<ResizeOutcome(uint32_t size)>;
  using JoinHandler = std::function<void()>;

  // Returns the one peer of this process. It is never destroyed, because MindSpore's threads may outlive static
  // destructors.
  static Peer& Get();

  // Returns the current communicator. If there is a join handler, calls it first.
  std::shared_ptr<Communicator> Current();

  // Sets the handler with which this process joins its cluster later, by calling Join or Leave. When that is done, the
  // handler removes itself. Every call of Current() calls the handler first. Several threads may call it at once, and
  // the handler itself may call Current().
  void SetJoinHandler(JoinHandler handler);

  // See Background. An operation uses the communicator that was current at its start, even if it changes later.
  uint64_t Start(const Operation& operation) { return TheBackground().Start(Current(), operation); }
  void Wait(const kf_started* started, size_t num_started) { TheBackground().Wait(started, num_started); }

  // Sets the number of samples with which this rank contributes to later gradient reductions; see Operation.
  void SetWeight(uint32_t weight) { weight_.store(weight, std::memory_order_relaxed); }
  uint32_t weight() const { return weight_.load(std::memory_order_relaxed); }

  // Sets a description of the parameters that this rank begins to train; "" means none. It is part of the layout of
  // gradient reductions. If ranks have different claims, all of them get a mismatch error in the first reduction,
  // before any data is sent (see MismatchText). The claim is cleared when the cluster version changes, so a joining
  // worker has no claim.
  void SetClaim(const std::string& claim);
  // Returns `layout` with the claim in front of it.
  std::string WithClaim(const char* layout);

  // The model stores of this process and of the other processes in its cluster.
  store::PeerStore& store();

  // Becomes rank `rank` in the segment of descriptor `fd` and waits for the other members. The previous communicator is
  // closed. The caller keeps the descriptor.
  void Join(int fd, uint32_t rank, const std::string& address, bool has_state, const CommunicatorOptions& options);
  // The same for a cluster over several hosts. It needs the segment of this host, the segment of all ranks, and the
  // sockets to the transport (see ClusterCommunicator) and to the model transport (see OtherHosts).
  void JoinHosts(int local, int control_segment, int requests, int models, const hosts::Places& places, uint32_t rank,
                 const std::string& address, bool has_state, const CommunicatorOptions& options);

  // Leaves the cluster. Later collectives throw StaleClusterError with `reason`.
  void Leave(const std::string& reason);
  // Returns to a cluster of one, the state before the first Join.
  void Reset();

  // Resizes the cluster. All ranks call this with the same size, and the sizes are compared. If the size differs from
  // the current size, the resize handler makes the change.
  ResizeOutcome Resize(uint32_t size);
  void SetResizeHandler(ResizeHandler handler);

 private:
  Peer();
  Background& TheBackground();
  template <typename Next>
  void Enter(const std::shared_ptr<Next>& next);
  void Install(std::shared_ptr<Communicator> next, const std::string& why_stale);

  mutable std::mutex mutex_;
  std::shared_ptr<Communicator> current_;  // guarded by mutex_, never null
  ResizeHandler resize_handler_;           // guarded by mutex_
  JoinHandler join_handler_;               // guarded by mutex_
  std::atomic<bool> joins_later_{false};   // there is a join handler
  std::atomic<uint32_t> weight_{1};
  std::string claim_;  // guarded by mutex_
  // Guarded by mutex_. Never destroyed: a forked child that becomes a member gets its own one, and doesn't touch its
  // parent's.
  Background* background_;
  Heartbeat heartbeat_;  // guarded by mutex_
};

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_PEER_H_
