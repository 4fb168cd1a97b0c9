// Implements the parts of a communicator that don't depend on the data transfer: its members, and
// what a rank does if it can't continue (it *gives up*).
//
// A rank that reaches a deadline notifies the other ranks, and they give up too. The ranks have
// then reached different operations, so the communicator is unusable. A rank also notifies the
// other ranks if it has a local error (for example, no memory or Ctrl-C) and the launcher's policy
// is to fail.
//
// If the launcher's policy is to recover, a rank with a local error gives up alone. The rank
// reports this in shared memory and stops its heartbeat. The launcher then kills the rank's process
// if necessary, and marks the rank as lost. Until then, the other ranks wait.
//
// If another thread of the same rank has closed the communicator, the rank sends no notice, because
// that thread has already sent one.
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

void Communicator::NoteActivity(uint32_t activity) {
  if (is_member() && !process_.IsCopy()) control()->NoteActivity(rank_, activity);
}

void Communicator::SetBusy(bool busy) {
  if (is_member() && !process_.IsCopy()) control()->SetBusy(rank_, busy);
}

void Communicator::Close(kf_status status, const std::string& reason) {
  if (process_.IsCopy()) return;  // a forked child's copy already refuses every call
  closure_.Close(status, reason);
}

void Communicator::Leave() {
  if (is_member() && !process_.IsCopy()) control()->Leave(rank_);
}

// No notice is sent if the launcher has fenced this rank, or if the rank fails during this call.
// The other ranks detect these failures without a notice.
//
// If several threads of this rank have errors, only the first error closes the communicator and is
// sent to the other ranks. Both happen while the thread holds the closure's mutex. So after an
// error that ends only this rank's communicator (kAlone), no later error of this rank ends the
// communicators of the other ranks.
void Communicator::GiveUp(const Error& error) {
  if (!is_member() || process_.IsCopy()) return;
  closure_.Close(error.status(), error.what(), [&] {
    KUNGFU_FAULT_POINT("when it has closed its communicator");
    const kf_status status = error.status();
    if (recovers() && status == KF_STALE) return;  // the rank is leaving the cluster, and reports that it leaves
    // An interrupted rank may have written only a part of its contribution.
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
