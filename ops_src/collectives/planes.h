// *Planes* are the inputs of a special all-reduce. Each rank contributes several planes or none. Each plane is as large
// as the operation's tensors, and the operation defines the order in which the planes are added. A training step with
// shards uses planes for its gradients (shards/tree.h).
#ifndef KUNGFU_COLLECTIVES_PLANES_H_
#define KUNGFU_COLLECTIVES_PLANES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kungfu {

struct Planes {
  static constexpr int32_t kAdd = -1;
  // The largest depth of the program's stack. A tree over 4096 shards doesn't need more.
  static constexpr size_t kMaxDepth = 16;

  // The number of planes of each rank. Planes are numbered consecutively, in the order of the ranks.
  std::vector<uint32_t> of_rank;
  uint32_t most = 0;  // the largest number of planes of a rank
  // The additions in postfix order. A number pushes that plane on a stack. kAdd replaces the two topmost results by
  // their sum, with the earlier result on the left, and rounds the sum to the operation's dtype.
  std::vector<int32_t> program;
  double divisor = 1;  // the sum is divided by it
  // The memory of each of this rank's planes. A plane contains the tensors' elements one after another. Null means that
  // the plane is in the operation's inputs.
  std::vector<const char*> own;
  uint64_t hash = 0;  // of everything that must be equal at all ranks

  size_t count() const {
    size_t sum = 0;
    for (const uint32_t n : of_rank) sum += n;
    return sum;
  }
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_PLANES_H_
