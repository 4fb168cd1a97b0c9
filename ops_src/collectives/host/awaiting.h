// Reports to the launcher which rank this rank waits for.
#ifndef KUNGFU_COLLECTIVES_HOST_AWAITING_H_
#define KUNGFU_COLLECTIVES_HOST_AWAITING_H_

#include <cstdint>

#include "transport/shm/segment_control_block.h"

namespace kungfu::host {

// The destructor withdraws the report when the wait ends.
class Awaiting {
 public:
  Awaiting(const shm::SegmentControlBlock& control, uint32_t rank) : control_(control), rank_(rank) {}
  ~Awaiting() {
    if (noted_ != 0) control_.ForgetAwaited(rank_, noted_);
  }
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;

  void Note(uint32_t peer, bool overdue) { noted_ = control_.NoteAwaited(rank_, peer, overdue, noted_); }
  // Reports a wait for a resource that any rank may hold: a staging buffer, or the lock of the
  // channel table. The launcher never treats a rank with this report as stuck. A chain of waiting
  // ranks ends at this rank.
  void NoteNoPeer() { Note(rank_, /*overdue=*/false); }

 private:
  const shm::SegmentControlBlock& control_;
  const uint32_t rank_;
  uint32_t noted_ = 0;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_AWAITING_H_
