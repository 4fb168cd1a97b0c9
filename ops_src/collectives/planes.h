// An all-reduce to which a rank brings several *planes*, each as large as the operation's tensors, and which says in
// which order they are added. (A step's shards: shards/tree.h.)
#ifndef KUNGFU_COLLECTIVES_PLANES_H_
#define KUNGFU_COLLECTIVES_PLANES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kungfu {

struct Planes {
  static constexpr int32_t kAdd = -1;
  // Of the additions that wait for their right side: a tree over 4096 leaves has no more.
  static constexpr size_t kMaxDepth = 16;

  // By rank. Planes are numbered through, in the order of the ranks.
  std::vector<uint32_t> of_rank;
  uint32_t most = 0;  // of a rank
  // In postfix order: the number of a plane, or kAdd, which takes the two results before it, the earlier one on the
  // left, and rounds their sum to the operation's dtype.
  std::vector<int32_t> program;
  double divisor = 1;  // of the result
  // Where this rank has its planes, with the tensors' elements one after another; null: in the operation's inputs.
  std::vector<const char*> own;
  uint64_t hash = 0;  // of all that has to be equal at all ranks

  size_t count() const {
    size_t sum = 0;
    for (const uint32_t n : of_rank) sum += n;
    return sum;
  }
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_PLANES_H_
