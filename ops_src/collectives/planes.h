// *Planes* are the inputs of a special all-reduce. Each rank contributes several planes or none.
// Each plane is as large as the operation's tensors, and the operation defines the order in which
// the planes are added. A sharded training step uses planes for its gradients (shards/tree.h).
#ifndef KUNGFU_COLLECTIVES_PLANES_H_
#define KUNGFU_COLLECTIVES_PLANES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kungfu {

struct Planes {
  static constexpr int32_t kAdd = -1;
  // The largest stack depth of the program. A tree of 4096 shards doesn't need more.
  static constexpr size_t kMaxDepth = 16;

  // For each rank, the number of its planes. Planes are numbered consecutively, in the order of the
  // ranks.
  std::vector<uint32_t> of_rank;
  uint32_t most = 0;  // the largest number of planes on one rank
  // The program: the additions in postfix order. A plane's number pushes that plane on a stack.
  // kAdd replaces the two topmost values by their sum, with the earlier value on the left, and
  // rounds the sum to the operation's dtype.
  std::vector<int32_t> program;
  double divisor = 1;  // the sum is divided by this number
  // The memory of each of this rank's planes. A plane contains the tensors' elements one after
  // another. Null means that the plane is in the operation's inputs.
  std::vector<const char*> own;
  uint64_t hash = 0;  // hash of everything that must be equal on all ranks

  size_t count() const {
    size_t sum = 0;
    for (const uint32_t n : of_rank) sum += n;
    return sum;
  }
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_PLANES_H_
