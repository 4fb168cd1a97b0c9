// Keeps copies of an operation's inputs, so that the operation can run again after it has
// overwritten its inputs.
#ifndef KUNGFU_COLLECTIVES_KEPT_INPUTS_H_
#define KUNGFU_COLLECTIVES_KEPT_INPUTS_H_

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/memory.h"
#include "collectives/dtype.h"
#include "collectives/operation.h"

namespace kungfu {

// Returns true if a tensor's output is the same memory as its input, so that writing the output
// destroys the input.
inline bool InPlace(const Operation& operation) {
  return std::any_of(operation.tensors, operation.tensors + operation.num_tensors,
                     [](const kf_tensor& tensor) { return tensor.input == tensor.output && tensor.count > 0; });
}

// A list of operations in which each in-place operation reads its inputs from a copy. The copies
// exist as long as this object. The memory of the copies belongs to the thread and is reused,
// because allocating new pages takes longer than copying.
class KeptInputs {
 public:
  KeptInputs(const Operation* operations, size_t num_operations)
      : operations_(operations, operations + num_operations) {
    size_t bytes = 0;
    for (const Operation& operation : operations_) {
      for (size_t i = 0; InPlace(operation) && i < operation.num_tensors; i++) bytes += Aligned(BytesOf(operation, i));
    }
    thread_local Memory memory;
    char* at = memory.Get(bytes);
    tensors_.resize(num_operations);
    for (size_t k = 0; k < num_operations; k++) {
      Operation& operation = operations_[k];
      if (!InPlace(operation)) continue;
      tensors_[k].assign(operation.tensors, operation.tensors + operation.num_tensors);
      operation.tensors = tensors_[k].data();
      for (size_t i = 0; i < operation.num_tensors; i++) {
        const size_t n = BytesOf(operation, i);
        if (n == 0) continue;
        std::memcpy(at, tensors_[k][i].input, n);
        tensors_[k][i].input = at;
        at += Aligned(n);
      }
    }
  }
  const Operation* operations() const { return operations_.data(); }

 private:
  static size_t BytesOf(const Operation& operation, size_t tensor) {
    return operation.tensors[tensor].count * SizeOf(operation.dtype);
  }

  std::vector<Operation> operations_;
  std::vector<std::vector<kf_tensor>> tensors_;
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_KEPT_INPUTS_H_
