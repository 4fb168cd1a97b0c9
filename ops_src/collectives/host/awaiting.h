// What a rank that waits says to the launcher.
#ifndef KUNGFU_COLLECTIVES_HOST_AWAITING_H_
#define KUNGFU_COLLECTIVES_HOST_AWAITING_H_

#include <cstdint>

#include "transport/shm/segment_control_block.h"

namespace kungfu::host {

// Says which rank this one waits for, until the wait is over, whichever way.
class Awaiting {
 public:
  Awaiting(const shm::SegmentControlBlock& control, uint32_t rank) : control_(control), rank_(rank) {}
  ~Awaiting() {
    if (noted_ != 0) control_.ForgetAwaited(rank_, noted_);
  }
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;

  void Note(uint32_t peer, bool overdue) { noted_ = control_.NoteAwaited(rank_, peer, overdue, noted_); }
  // It waits for what any rank may have (a staging buffer, the lock of the table). The launcher takes no rank that
  // waits for stuck, and from here it follows the wait to no other one.
  void NoteNoPeer() { Note(rank_, /*overdue=*/false); }

 private:
  const shm::SegmentControlBlock& control_;
  const uint32_t rank_;
  uint32_t noted_ = 0;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_AWAITING_H_
