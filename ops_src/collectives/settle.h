// Runs several operations so that all of them end in the same generation.
#ifndef KUNGFU_COLLECTIVES_SETTLE_H_
#define KUNGFU_COLLECTIVES_SETTLE_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "collectives/operation.h"

namespace kungfu {

// Runs an operation in `from_generation` or later, and returns the generation in which it ended.
using RunFromGeneration = std::function<uint32_t(const Operation& operation, uint32_t from_generation)>;

// Runs the operations one after another, then calls SettleBy, and returns the common generation.
// With `keep_inputs`, copies the inputs that the operations overwrite, because operations may have
// to run again.
uint32_t RunAndSettle(const RunFromGeneration& run, bool keep_inputs, const Operation* operations,
                      size_t num_operations);

// Runs operations again until all of them have ended in the same generation, and returns that
// generation. An operation runs again if it ended in an earlier generation than the latest one.
// `generations` is equal on all survivors. So all survivors run the same operations again, in the
// same order.
uint32_t SettleBy(const RunFromGeneration& run, const Operation* operations, uint32_t* generations,
                  size_t num_operations);

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_SETTLE_H_
