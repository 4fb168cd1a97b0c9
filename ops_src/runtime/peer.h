// This process as a member of a cluster. A process has one peer. The peer has one communicator for
// each cluster version of which the process is a member.
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

// Thread-safe. Each call uses the communicator that is current when the call begins. If the
// membership changes during an operation, the operation fails with StaleClusterError.
class Peer {
 public:
  // Changes the cluster to `size` ranks and returns the outcome. Throws Error.
  using ResizeHandler = std::function<ResizeOutcome(uint32_t size)>;
  using JoinHandler = std::function<void()>;

  // Returns the only Peer object of this process. It is never destroyed, because MindSpore's
  // threads may outlive static destructors.
  static Peer& Get();

  // Returns the current communicator. If a join handler is set, calls it first.
  std::shared_ptr<Communicator> Current();

  // Sets the handler that makes this process join its cluster later. The handler calls Join or
  // Leave, and then removes itself. Until then, every call of Current() first calls the handler.
  // Several threads may call the handler at once, and the handler itself may call Current().
  void SetJoinHandler(JoinHandler handler);

  // See Background. A started operation keeps the communicator that was current when it started,
  // even if the current communicator changes.
  uint64_t Start(const Operation& operation) { return TheBackground().Start(Current(), operation); }
  void Wait(const kf_started* started, size_t num_started) { TheBackground().Wait(started, num_started); }

  // Sets the number of samples that this rank contributes to later gradient reductions. See
  // Operation.
  void SetWeight(uint32_t weight) { weight_.store(weight, std::memory_order_relaxed); }
  uint32_t weight() const { return weight_.load(std::memory_order_relaxed); }

  // Sets a description of the parameters that this rank begins to train. An empty claim means no
  // description. The claim becomes part of the layout of gradient reductions. If ranks have
  // different claims, all of them get a mismatch error in the first reduction, before any data is
  // sent (see MismatchText). When the cluster version changes, the claim is cleared, so that all
  // ranks match a joining worker, which has no claim.
  void SetClaim(const std::string& claim);
  // Returns `layout` with the claim added in front.
  std::string WithClaim(const char* layout);

  // Returns the object that accesses the model stores of all processes in the cluster.
  store::PeerStore& store();

  // Becomes rank `rank` in the segment with descriptor `fd`, and waits for the other members.
  // Closes the previous communicator. The caller still owns the descriptor.
  void Join(int fd, uint32_t rank, const std::string& address, bool has_state, const CommunicatorOptions& options);
  // Does the same as Join for a cluster over several hosts. The descriptors refer to this host's
  // segment, to the segment with all ranks, and to two sockets: one to the transport (see
  // ClusterCommunicator) and one to the model transport (see OtherHosts).
  void JoinHosts(int local, int control_segment, int requests, int models, const hosts::Places& places, uint32_t rank,
                 const std::string& address, bool has_state, const CommunicatorOptions& options);

  // Leaves the cluster. Later collectives throw StaleClusterError with `reason`.
  void Leave(const std::string& reason);
  // Returns to a cluster of one rank, which is the state before the first call of Join.
  void Reset();

  // Resizes the cluster. All ranks must pass the same size, and the call compares the sizes. If the
  // size differs from the current size, the resize handler makes the change.
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
  std::atomic<bool> joins_later_{false};   // true if there is a join handler
  std::atomic<uint32_t> weight_{1};
  std::string claim_;  // guarded by mutex_
  // Guarded by mutex_. Never destroyed. A forked child that becomes a member gets its own object,
  // and doesn't use its parent's.
  Background* background_;
  Heartbeat heartbeat_;  // guarded by mutex_
};

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_PEER_H_
