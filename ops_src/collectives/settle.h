// Operations that have to be of one mind.
#ifndef KUNGFU_COLLECTIVES_SETTLE_H_
#define KUNGFU_COLLECTIVES_SETTLE_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "collectives/operation.h"

namespace kungfu {

// Runs an operation, from this generation on, and answers in which it ended.
using RunFromGeneration = std::function<uint32_t(const Operation& operation, uint32_t from_generation)>;

// Runs them one after another, and settles them. `keep_inputs`: they may have to be done again, so what they write over
// is copied before.
uint32_t RunAndSettle(const RunFromGeneration& run, bool keep_inputs, const Operation* operations,
                      size_t num_operations);

// Does again what ended in an earlier generation than the latest, and answers that. All survivors have the same
// generations here, since each operation ended in the same at all of them, and so they do the same operations again, in
// the same order.
uint32_t SettleBy(const RunFromGeneration& run, const Operation* operations, uint32_t* generations,
                  size_t num_operations);

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_SETTLE_H_
