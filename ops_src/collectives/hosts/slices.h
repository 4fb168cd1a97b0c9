// A large all-reduce over several hosts goes in slices: while one is exchanged between the hosts, the next is reduced
// inside each host, and the result of the one before goes out to the ranks.
//
// Each slice is an operation of its own, by all of link.h's rules; so a slice ends in one generation at every rank that
// lives to hear it, and all that is left to be said here is how several become one:
//
//  - One generation. When all slices are over, those that ended in an earlier generation than the latest are done again
//    in that one, and so on until there are none (as settle.h does for several operations). Everybody knows the same
//    generations, hence does the same slices again, in the same order. What a slice needs for that are its inputs,
//    which are kept where the operation is in place and the members go on without the dead.
//  - Nobody waits in a circle. kTracks slices are under way at a time, each on a track of its own (Operation), so its
//    link has a thread for each. A rank brings them in their order, and hears of the oldest when it has brought as
//    many as there are tracks: it begins the next one on a track when it has the result of the one before there. A
//    slice that is to be brought again is so when its turn to be heard of has come; that waits for ranks of its host
//    alone, which come there in the same order.
//  - The same operation everywhere. What is compared of each slice says of which whole it is a part. A host's ranks
//    bring the first one on track 0, as they do an operation in one, where whoever brings something else is found; and
//    all others only when the link says that the other hosts have brought the same first slice, too (Verdict::kMore).
//    So a mismatch finds nothing else under way, and leaves all hosts' counts of the tracks' operations equal.
#ifndef KUNGFU_COLLECTIVES_HOSTS_SLICES_H_
#define KUNGFU_COLLECTIVES_HOSTS_SLICES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/hosts/protocol.h"
#include "collectives/operation.h"

namespace kungfu::hosts {

// One operation, cut. It outlives this.
class Slices {
 public:
  // Whether it is to be cut, which all ranks see alike.
  static bool Cuts(const Operation& operation, size_t slice_bytes);

  Slices(const Operation& operation, size_t slice_bytes);

  uint32_t size() const { return static_cast<uint32_t>(tensors_.size()); }
  // Slice `k`, to go on that track.
  Operation At(uint32_t k, uint8_t track) const;

 private:
  const Operation& whole_;
  std::vector<std::vector<kf_tensor>> tensors_;  // of each slice
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_SLICES_H_
