// Operations that have to be of one mind.
#ifndef KUNGFU_COLLECTIVES_SETTLE_H_
#define KUNGFU_COLLECTIVES_SETTLE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "collectives/operation.h"

namespace kungfu {

// Does again what ended in an earlier generation than the latest, and answers that. All survivors have the same
// generations here, since each operation ended in the same at all of them, and so they do the same operations again, in
// the same order. `run`(operation, generation from which on it may end) answers in which it ended.
template <typename Run>
uint32_t SettleBy(const Run& run, const Operation* operations, uint32_t* generations, size_t num_operations) {
  uint32_t latest = 0;
  for (size_t k = 0; k < num_operations; k++) latest = std::max(latest, generations[k]);
  for (size_t k = 0; k < num_operations; k++) {
    if (generations[k] == latest) continue;
    generations[k] = run(operations[k], latest);
    if (generations[k] > latest) {
      latest = generations[k];
      k = static_cast<size_t>(-1);  // another death: from the beginning
    }
  }
  return latest;
}

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_SETTLE_H_
