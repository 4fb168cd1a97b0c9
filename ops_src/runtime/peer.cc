#include "runtime/peer.h"

#include <pthread.h>

#include "base/trace.h"
#include "collectives/gather.h"
#include "collectives/host/host_communicator.h"
#include "collectives/hosts/cluster_communicator.h"
#include "collectives/lone_communicator.h"

namespace kungfu {

Peer& Peer::Get() {
  static Peer* const peer = new Peer;
  return *peer;
}

namespace {

// Create the peer when the library is loaded, so that no fork can happen while it is being created.
[[maybe_unused]] const Peer& made = Peer::Get();

}  // namespace

Peer::Peer() : current_(std::make_shared<LoneCommunicator>()), background_(new Background) {
  // A forked child may ask for its rank, so the lock must be free in the child. No thread waits for
  // anything else while it holds the lock.
  pthread_atfork([] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); }, [] { Get().mutex_.unlock(); });
}

std::shared_ptr<Communicator> Peer::Current() {
  if (joins_later_.load(std::memory_order_acquire)) {
    JoinHandler handler;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      handler = join_handler_;
    }
    if (handler) handler();
  }
  std::lock_guard<std::mutex> guard(mutex_);
  return current_;
}

void Peer::SetJoinHandler(JoinHandler handler) {
  std::lock_guard<std::mutex> guard(mutex_);
  join_handler_.swap(handler);  // the previous handler is destroyed after the lock is released, because destroying it
                                // may wait for Python
  joins_later_.store(join_handler_ != nullptr, std::memory_order_release);
}

void Peer::SetClaim(const std::string& claim) {
  std::lock_guard<std::mutex> guard(mutex_);
  claim_ = claim;
}

std::string Peer::WithClaim(const char* layout) {
  std::lock_guard<std::mutex> guard(mutex_);
  return claim_ + (layout == nullptr ? "" : layout);
}

// Never destroyed, like the peer. The first call creates it, possibly in a forked child.
store::PeerStore& Peer::store() {
  static auto* const store = new store::PeerStore([] {
    const auto communicator = Get().Current();
    return store::Position{communicator->cluster_version(), communicator->rank(), communicator->size()};
  });
  return *store;
}

void Peer::Join(int fd, uint32_t rank, const std::string& address, bool has_state, const CommunicatorOptions& options) {
  const auto next =
      std::make_shared<HostCommunicator>(std::make_shared<shm::Segment>(fd), rank, address, has_state, options);
  Enter(next);
  store().KeepOtherHosts(next->cluster_version());
}

void Peer::JoinHosts(int local, int control_segment, int requests, int models, const hosts::Places& places,
                     uint32_t rank, const std::string& address, bool has_state, const CommunicatorOptions& options) {
  const auto next = std::make_shared<ClusterCommunicator>(std::make_shared<shm::Segment>(local),
                                                          std::make_shared<shm::Segment>(control_segment), requests,
                                                          places, rank, address, has_state, options);
  const uint64_t version = next->cluster_version();
  // The other hosts are added before any thread uses the new version. The old version's other hosts
  // are removed when no thread uses the old version any more.
  store().AddOtherHosts(version, std::make_shared<store::OtherHosts>(models, places, rank, options.collective_timeout));
  try {
    Enter(next);
  } catch (...) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t before = current_->cluster_version();
    lock.unlock();
    store().KeepOtherHosts(before);
    throw;
  }
  store().KeepOtherHosts(version);
}

template <typename Next>
void Peer::Enter(const std::shared_ptr<Next>& next) {
  {
    // From now on, a rank with a slot must send heartbeats, even while it waits for the other
    // ranks.
    std::lock_guard<std::mutex> guard(mutex_);
    heartbeat_.Follow(next);
  }
  try {
    next->Assemble();
  } catch (...) {
    // If the policy is to recover, the other members wait only until this rank is marked as failed.
    // If this rank left instead, all members would give up. GiveUp has stopped this rank's
    // heartbeat in the cluster version, so the launcher ends the process if the process doesn't end
    // on its own.
    if (next->recovers()) throw;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      heartbeat_.Follow(current_);
    }
    next->Leave();
    throw;
  }
  const uint64_t version = next->cluster_version();
  if (Trace::On()) {
    const uint64_t now = Trace::Now();
    Trace::Add(
        {now, now, {version, next->rank(), next->size()}, Trace::Name("new cluster version"), Trace::What::kMember});
  }
  Install(next, Text("this communicator is closed: the cluster is at version ", version));
}

void Peer::Leave(const std::string& reason) {
  const auto current = Current();
  current->Close(KF_STALE, reason);
  current->Leave();
}

void Peer::Reset() {
  Install(std::make_shared<LoneCommunicator>(), "the runtime has been finalized");
  TheBackground().Stop();  // ends immediately, because the communicator of the queued operations is closed
}

Background& Peer::TheBackground() {
  std::lock_guard<std::mutex> guard(mutex_);
  return *background_;
}

void Peer::Install(std::shared_ptr<Communicator> next, const std::string& why_stale) {
  std::shared_ptr<Communicator> previous;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    previous = std::move(current_);
    current_ = std::move(next);
    claim_.clear();
    heartbeat_.Follow(current_);
    if (background_->IsCopy() && current_->is_member()) background_ = new Background;
  }
  previous->Close(KF_STALE, why_stale);
  previous->Leave();
}

ResizeOutcome Peer::Resize(uint32_t size) {
  const auto communicator = Current();
  if (size < 1) throw Error(KF_INVALID, "resize to 0: a cluster has at least 1 rank");
  // A rank that calls resize alone waits here, and the log shows this name to the user.
  const auto asked = GatherLiving(*communicator, "kungfu/resize (all ranks must call it)", size);
  for (const uint32_t r : asked.members) {
    if (asked.rows[r] == size) continue;
    std::string message = "the ranks ask for different sizes:";
    for (const uint32_t m : asked.members) {
      message += Text(m == asked.members.front() ? "" : ",", " rank ", m, ": ", asked.rows[m]);
    }
    throw Error(KF_MISMATCH, message);
  }
  if (size == communicator->size()) return {};
  ResizeHandler handler;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    handler = resize_handler_;
  }
  if (!handler) {
    throw Error(KF_RESIZE, Text("resize to ", size,
                                ": this process has no launcher and stays at 1 rank; start it with kungfu-run"));
  }
  return handler(size);
}

void Peer::SetResizeHandler(ResizeHandler handler) {
  std::lock_guard<std::mutex> guard(mutex_);
  resize_handler_.swap(handler);  // destroyed after the lock is released, as in SetJoinHandler
}

}  // namespace kungfu
