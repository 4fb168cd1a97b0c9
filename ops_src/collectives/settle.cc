#include "collectives/settle.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/fault_point.h"
#include "collectives/kept_inputs.h"

namespace kungfu {

uint32_t RunAndSettle(const RunFromGeneration& run, bool keep_inputs, const Operation* operations,
                      size_t num_operations) {
  std::optional<KeptInputs> kept;
  if (keep_inputs && std::any_of(operations, operations + num_operations, InPlace)) {
    operations = kept.emplace(operations, num_operations).operations();
  }
  std::vector<uint32_t> generations;
  for (size_t k = 0; k < num_operations; k++) {
    generations.push_back(run(operations[k], 0));
    KUNGFU_FAULT_POINT("between operations");
  }
  return SettleBy(run, operations, generations.data(), num_operations);
}

uint32_t SettleBy(const RunFromGeneration& run, const Operation* operations, uint32_t* generations,
                  size_t num_operations) {
  uint32_t latest = 0;
  for (size_t k = 0; k < num_operations; k++) latest = std::max(latest, generations[k]);
  for (size_t k = 0; k < num_operations; k++) {
    if (generations[k] == latest) continue;
    generations[k] = run(operations[k], latest);
    if (generations[k] > latest) {
      latest = generations[k];
      k = static_cast<size_t>(-1);  // another rank has failed, so begin again with the first operation
    }
  }
  return latest;
}

}  // namespace kungfu
