// This process as a member of a cluster: one peer, and one communicator for each cluster version it lives through.
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

// Thread-safe. A call uses the communicator that is current when it begins; an operation that is under way when the
// membership changes ends with StaleClusterError.
class Peer {
 public:
  // Changes the membership to this many ranks and tells what came of it. Throws Error.
  using ResizeHandler = std::function<ResizeOutcome(uint32_t size)>;
  using JoinHandler = std::function<void()>;

  // The one peer of this process. It is never destroyed: threads of MindSpore may outlive static destructors.
  static Peer& Get();

  // If there is a join handler, after it has returned.
  std::shared_ptr<Communicator> Current();

  // A process that may join its cluster later gives a handler that does so (it calls Join, or Leave), and takes it away
  // when that is done. Every caller of Current() calls it first, several at once perhaps, and from inside it as well.
  void SetJoinHandler(JoinHandler handler);

  // See Background. An operation goes on with the communicator that was current at its start.
  uint64_t Start(const Operation& operation) { return TheBackground().Start(Current(), operation); }
  void Wait(const kf_started* started, size_t num_started) { TheBackground().Wait(started, num_started); }

  // How many samples this rank brings to the gradient reductions that begin from now on; see Operation.
  void SetWeight(uint32_t weight) { weight_.store(weight, std::memory_order_relaxed); }
  uint32_t weight() const { return weight_.load(std::memory_order_relaxed); }

  // What this rank says of the parameters that it begins to train; "": nothing. It is a part of the layout of its
  // gradient reductions, so that ranks with different claims find a mismatch in the first of them, all alike, and
  // nothing more is sent. Forgotten with the cluster version: a joining worker has no claim.
  void SetClaim(const std::string& claim);
  // `layout` with the claim before it.
  std::string WithClaim(const char* layout);

  // The models of this process and of the others in its cluster.
  store::PeerStore& store();

  // Becomes rank `rank` of the segment behind `fd` and waits for the other members; the communicator so far is
  // finished. The descriptor stays the caller's.
  void Join(int fd, uint32_t rank, const std::string& address, bool has_state, const CommunicatorOptions& options);
  // The same in a cluster over several hosts: the segments of this host and of all ranks, and the sockets to the
  // transport (see ClusterCommunicator) and to the model transport (see OtherHosts).
  void JoinHosts(int local, int control_segment, int requests, int models, const hosts::Places& places, uint32_t rank,
                 const std::string& address, bool has_state, const CommunicatorOptions& options);

  // Takes its leave: from now on every collective raises StaleClusterError with `reason`.
  void Leave(const std::string& reason);
  // Back to a cluster of one, as before the first Join.
  void Reset();

  // All ranks call this with the same size; they compare it, and if it is not the present size the handler makes the
  // change.
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
  // Guarded by mutex_. Never destroyed: a forked child that becomes a member by itself gets another one, and leaves its
  // parent's as it is.
  Background* background_;
  Heartbeat heartbeat_;  // guarded by mutex_
};

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_PEER_H_
