#include "collectives/lone_communicator.h"

#include <cstring>

#include "collectives/dtype.h"
#include "collectives/host/transfer.h"
#include "collectives/observer.h"

namespace kungfu {

void RunAlone(const Operation& operation) {
  if (operation.planes != nullptr) {
    const char* const nowhere = nullptr;
    host::Cursor cursor(operation);
    host::Consume(operation, host::Reducer(operation), /*members=*/{0}, /*rank=*/0, /*size=*/1, cursor,
                  CountOf(operation) * SizeOf(operation.dtype), &nowhere, /*stride=*/0, /*stream=*/false);
    return;
  }
  for (size_t i = 0; i < operation.num_tensors; i++) {
    const kf_tensor& tensor = operation.tensors[i];
    const size_t bytes = tensor.count * SizeOf(operation.dtype);
    if (tensor.output != nullptr && tensor.output != tensor.input && bytes > 0) {
      std::memcpy(tensor.output, tensor.input, bytes);
    }
  }
}

uint32_t LoneCommunicator::Run(const Operation& operation) {
  closure_.ThrowIfClosed();
  Validate(operation, /*size=*/1);
  RequireMemory(operation, /*inputs=*/true, /*outputs=*/operation.kind != Kind::kBroadcast);
  const auto observed = Observer::Observe(operation);
  RunAlone(operation);
  if (observed) observed->Done(/*size=*/1);
  return 0;
}

std::optional<uint32_t> LoneCommunicator::RunRenewable(Renewable& operation, uint32_t from_generation) {
  const Operation* const ready = operation.In(from_generation);
  if (ready == nullptr) return std::nullopt;
  Run(*ready);
  return from_generation;
}

uint32_t LoneCommunicator::RunAll(const Operation* operations, size_t num_operations) {
  for (size_t k = 0; k < num_operations; k++) Run(operations[k]);
  if (num_operations > 0) reductions_.NoteCommit(operations[0], 0);
  return 0;
}

}  // namespace kungfu
