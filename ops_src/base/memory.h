// Working memory for copies of tensors.
#ifndef KUNGFU_BASE_MEMORY_H_
#define KUNGFU_BASE_MEMORY_H_

#include <cstddef>
#include <cstdlib>
#include <memory>

#include "base/error.h"

namespace kungfu {

inline constexpr size_t kAlign = 64;  // one cache line; the reductions are fastest if their data has this alignment

inline size_t Aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};

// A memory block that can only grow. If it grows, it loses its contents.
class Memory {
 public:
  char* Get(size_t bytes) {
    if (bytes <= bytes_) return data_.get();
    data_.reset();
    bytes_ = 0;
    data_.reset(static_cast<char*>(std::aligned_alloc(kAlign, Aligned(bytes))));
    if (data_ == nullptr) throw Error(KF_INTERNAL, Text("can't allocate ", bytes, " bytes"));
    bytes_ = bytes;
    return data_.get();
  }
  size_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<char, FreeDeleter> data_;
  size_t bytes_ = 0;
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_MEMORY_H_
