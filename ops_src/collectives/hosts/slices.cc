#include "collectives/hosts/slices.h"

#include <algorithm>

#include "base/hash.h"
#include "collectives/dtype.h"

namespace kungfu::hosts {
namespace {

// Returns the part of a tensor that has `count` elements and begins at element `at`. A null pointer
// stays null.
kf_tensor Cut(const kf_tensor& tensor, size_t at, size_t count, size_t unit) {
  const auto* const in = static_cast<const char*>(tensor.input);
  auto* const out = static_cast<char*>(tensor.output);
  return {in == nullptr ? nullptr : in + at * unit, out == nullptr ? nullptr : out + at * unit, count};
}

}  // namespace

bool Slices::Cuts(const Operation& operation, size_t slice_bytes) {
  return operation.kind == Kind::kAllReduce && operation.planes == nullptr && !GoesInRows(operation) &&
         CountOf(operation) * SizeOf(operation.dtype) >= 2 * slice_bytes;
}

Slices::Slices(const Operation& operation, size_t slice_bytes) : whole_(operation) {
  const size_t unit = SizeOf(operation.dtype);
  const size_t room = slice_bytes / unit;
  size_t left = 0;  // number of elements that still fit in the last slice
  for (size_t i = 0; i < operation.num_tensors; i++) {
    const kf_tensor& tensor = operation.tensors[i];
    for (size_t at = 0; at < tensor.count;) {
      if (left == 0) {
        tensors_.emplace_back();
        left = room;
      }
      const size_t count = std::min(left, tensor.count - at);
      tensors_.back().push_back(Cut(tensor, at, count, unit));
      at += count;
      left -= count;
    }
  }
}

Operation Slices::At(uint32_t k, uint8_t track) const {
  Operation slice = whole_;
  slice.part.track = track;
  slice.tensors = tensors_[k].data();
  slice.num_tensors = tensors_[k].size();
  const uint64_t what[] = {SignatureOf(whole_), CountOf(whole_), k};
  slice.part.signature = Fnv1a(what, sizeof what) | 1;  // the signature must not be 0
  slice.part.of = &whole_;
  return slice;
}

}  // namespace kungfu::hosts
