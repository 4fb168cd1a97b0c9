// A large all-reduce over several hosts runs in slices. While the hosts exchange one slice, each
// host reduces the next slice, and sends the result of the previous slice to its ranks.
//
// Each slice is a separate operation that follows all rules of transport.h. So a slice ends in the
// same generation on every rank that keeps running until the slice ends. These invariants show how
// several slices form one operation:
//
// 1. One generation. When all slices have ended, some of them may have ended in an earlier
// generation than the latest one. These slices are repeated in the latest generation, until all
// slices have ended in the same generation (as settle.h does for several operations). All ranks
// know the same generations, so all ranks repeat the same slices in the same order. To repeat a
// slice, a rank needs the inputs of the slice. So the inputs are copied if the operation is in
// place and the launcher's policy is to recover.
// Test: ClusterFailures.SurvivorsOfAllHostsComeToTheSameEnd
//
// 2. There is no circular wait. Up to kTracks slices run at the same time, each on a different
// *track* (PartOfWhole). The transport has a thread for each track. A rank contributes to the
// slices in their order. When it has contributed to as many slices as there are tracks, it waits
// for the oldest slice. The rank begins the next slice on a track when it has the result of the
// previous slice on that track. If a slice must be contributed again, the rank does so when it
// waits for that slice. The new contribution waits only for ranks of the same host, which reach
// this point in the same order.
// Test: Cluster.SlicesHaveTheValuesOfTheWhole
//
// 3. The same operation on all ranks. The signature of a slice identifies the whole operation. A
// host's ranks contribute the first slice on track 0, like an operation without slices. So a rank
// that contributes a different operation is detected. The ranks contribute all other slices only
// after the transport reports that the other hosts have contributed the same first slice
// (Commit::kMore). So when a mismatch is found, no other slice is running, and the number of
// operations on each track is still equal on all hosts.
// Test: Cluster.AMismatchOfWhatGoesInSlicesIsAnErrorEverywhereAndBreaksNothing
#ifndef KUNGFU_COLLECTIVES_HOSTS_SLICES_H_
#define KUNGFU_COLLECTIVES_HOSTS_SLICES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/hosts/protocol.h"
#include "collectives/operation.h"

namespace kungfu::hosts {

// One operation that is divided into slices. The operation must outlive this object.
class Slices {
 public:
  // Returns true if the operation must be divided. All ranks get the same answer.
  static bool Cuts(const Operation& operation, size_t slice_bytes);

  Slices(const Operation& operation, size_t slice_bytes);

  uint32_t size() const { return static_cast<uint32_t>(tensors_.size()); }
  // Returns slice number `k`, which runs on track number `track`.
  Operation At(uint32_t k, uint8_t track) const;

 private:
  const Operation& whole_;
  std::vector<std::vector<kf_tensor>> tensors_;  // the tensors of each slice
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_SLICES_H_
