// A large all-reduce over several hosts goes in slices. While one slice is exchanged between the
// hosts, the next is reduced inside each host, and the result of the one before is broadcast to the
// ranks.
//
// Each slice is an operation of its own, by all rules of transport.h. So a slice ends in one
// generation at every rank that lives until its end. The rest of the argument is how several slices
// become one operation:
//
// 1. One generation. When all slices are over, those that ended in an earlier generation than the
// latest are repeated in the latest, until there are none (as settle.h does for several
// operations). All ranks know the same generations, so all repeat the same slices in the same
// order. That needs the inputs of a slice. They are copied if the operation is in place and the
// members go on after failures.
// Test: ClusterFailures.SurvivorsOfAllHostsComeToTheSameEnd
//
// 2. No ranks wait in a circle. kTracks slices are under way at a time, each on a track of its own
// (Operation), so its transport has a thread for each. A rank brings them in their order, and waits
// for the oldest when it has brought as many as there are tracks. It begins the next one on a track
// when it has the result of the one before there. A slice that must be repeated is repeated when
// its turn has come. That waits for ranks of its host alone, which come there in the same order.
// Test: Cluster.SlicesHaveTheValuesOfTheWhole
//
// 3. The same operation at all ranks. The signature of a slice names its whole. A host's ranks
// bring the first slice on track 0, like an operation that isn't cut, so a rank that brings
// something else is found. They bring all other slices only after the transport reports that the
// other hosts have brought the same first slice too (Commit::kMore). So a mismatch finds nothing
// else under way, and leaves the counts of the tracks' operations equal on all hosts.
// Test: Cluster.AMismatchOfWhatGoesInSlicesIsAnErrorEverywhereAndBreaksNothing
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
