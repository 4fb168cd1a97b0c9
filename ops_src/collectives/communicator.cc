// What doesn't depend on how data travels: which ranks are members, and how a rank gives up.
//
// If a rank gives up at its deadline, it says so and the others follow: the ranks are at different places then and the
// communicator is finished. The same holds if a rank fails for a reason of its own (no memory, Ctrl-C) and the policy
// is to fail. If the policy is to recover, such a rank is out alone: it says so, its heartbeat stops, and the others
// wait for the launcher. The launcher ends its process, if it hasn't ended by itself, and then marks it lost like any
// failed rank. A rank whose communicator was closed under it, by another of its threads, says nothing: that one has.
#include "collectives/communicator.h"

#include <algorithm>
#include <numeric>

#include "base/fault_point.h"
#include "base/interrupt.h"

namespace kungfu {
namespace {

Members Ranks(uint32_t size) {
  Members ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0u);
  return ranks;
}

}  // namespace

Communicator::Communicator(uint32_t rank, uint32_t size, uint64_t cluster_version)
    : rank_(rank), size_(size), cluster_version_(cluster_version), all_ranks_(Ranks(size)) {}

Members Communicator::MembersOf(uint32_t generation) const {
  Members members = all_ranks_;
  if (!is_member()) return members;
  for (uint32_t d = 0; d < generation; d++) {
    members.erase(std::find(members.begin(), members.end(), control()->FailedRank(d)));
  }
  return members;
}

uint32_t Communicator::StateRoot() const {
  if (!is_member()) return 0;
  for (const uint32_t r : Living()) {
    if (control()->HasState(r)) return r;
  }
  return size_;
}

void Communicator::Beat() {
  if (!is_member() || process_.IsCopy() || silent_.load(std::memory_order_relaxed)) return;
  control()->Beat(rank_);
}

void Communicator::RequestSyncPoint(uint64_t number) {
  if (!is_member()) return;
  process_.Refuse("request a sync point");
  control()->RequestSyncPoint(number);
}

void Communicator::NoteStep(uint64_t step, std::chrono::nanoseconds each) {
  if (is_member() && !process_.IsCopy()) control()->NoteStep(rank_, step, each);
}

void Communicator::SetBusy(bool busy) {
  if (is_member() && !process_.IsCopy()) control()->SetBusy(rank_, busy);
}

void Communicator::Close(kf_status status, const std::string& reason) {
  if (process_.IsCopy()) return;  // it refuses everything anyway
  closure_.Close(status, reason);
}

void Communicator::Leave() {
  if (is_member() && !process_.IsCopy()) control()->Leave(rank_);
}

// After a failure the ranks are at different places and this communicator is finished: at the others as well, or else,
// if they recover and the reason is this rank's own, they wait until it is marked lost. No rank follows one that was
// fenced before it gave up, or that fails while it gives up: the others find out by themselves.
//
// The error that finishes the communicator is exactly the one that the others get: it is closed and told under one hold
// of the closure's mutex, by the first of this rank's threads that fails. To the rest of them it is closed; they fail
// because of that first failure, or for a reason that has come too late to matter: a rank that is out alone stays out
// alone.
void Communicator::GiveUp(const Error& error) {
  if (!is_member() || process_.IsCopy()) return;
  closure_.Close(error.status(), error.what(), [&] {
    KUNGFU_FAULT_POINT("when it has closed its communicator");
    const kf_status status = error.status();
    if (recovers() && status == KF_STALE) return;  // it leaves, and says that
    // An interrupted rank may have written a part only.
    const bool interrupted = dynamic_cast<const Interrupted*>(&error) != nullptr;
    const bool own = interrupted ||
                     (status != KF_TIMEOUT && status != KF_PEER_LOST && status != KF_ABORTED && status != KF_MISMATCH);
    const bool alone = own && recovers();
    control()->GiveUp(rank_, alone ? GaveUp::kAlone : GaveUp::kForAll, own ? KF_ABORTED : status,
                      alone ? error.Described() : Text(control()->PeerName(rank_), " gave up: ", error.what()));
    if (alone) silent_.store(true, std::memory_order_relaxed);
  });
}

}  // namespace kungfu
