// Copies data between an operation's tensors and the buffers that the ranks share. Defines how a
// rank stages its data, and how the rank computes its output from the data that all ranks have
// staged.
#ifndef KUNGFU_COLLECTIVES_HOST_TRANSFER_H_
#define KUNGFU_COLLECTIVES_HOST_TRANSFER_H_

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "collectives/dtype.h"
#include "collectives/operation.h"
#include "collectives/reduce.h"
#include "collectives/stream.h"
#include "transport/shm/segment.h"

namespace kungfu::host {

// Walks over an operation's tensors as if they were one contiguous range. If `parts` > 1, the range
// contains only one rank's part of each tensor.
class Cursor {
 public:
  explicit Cursor(const Operation& operation, uint32_t parts = 1)
      : operation_(operation), unit_(SizeOf(operation.dtype)), parts_(parts) {}

  // Calls piece(tensor, offset in the tensor's part, offset in this take, bytes) for each
  // contiguous piece of the next `bytes` bytes.
  template <typename Piece>
  void Take(size_t bytes, const Piece& piece) {
    size_t at = 0;
    while (at < bytes) {
      const kf_tensor& tensor = operation_.tensors[index_];
      const size_t left = tensor.count / parts_ * unit_ - offset_;
      const size_t n = std::min(left, bytes - at);
      if (n > 0) piece(tensor, offset_, at, n);
      at += n;
      taken_ += n;
      offset_ += n;
      if (n == left) {
        index_++;
        offset_ = 0;
      }
    }
  }

  size_t taken() const { return taken_; }  // number of bytes taken so far; inside `piece`, the bytes before that piece

 private:
  const Operation& operation_;
  const size_t unit_;
  const size_t parts_;
  size_t taken_ = 0;
  size_t index_ = 0;
  size_t offset_ = 0;
};

inline char* At(void* base, size_t offset) { return static_cast<char*>(base) + offset; }
inline const char* At(const void* base, size_t offset) { return static_cast<const char*>(base) + offset; }

inline void Copy(void* to, const void* from, size_t bytes) {
  if (to != from && to != nullptr && bytes > 0) std::memcpy(to, from, bytes);
}

inline void CopyOut(void* to, const void* from, size_t bytes, bool stream) {
  if (stream) {
    StreamCopy(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

// Copies the data at `from` to the operation's tensors.
inline void CopyToTensors(const Operation& operation, const char* from) {
  Cursor output(operation);
  output.Take(CountOf(operation) * SizeOf(operation.dtype),
              [&](const kf_tensor& tensor, size_t offset, size_t at, size_t n) {
                std::memcpy(At(tensor.output, offset), from + at, n);
              });
}

// Combines the elements of all members into one result.
class Reducer {
 public:
  explicit Reducer(const Operation& operation)
      : reduce_(ReductionFor(operation.dtype, operation.op)),
        unit_(SizeOf(operation.dtype)),
        planes_(operation.planes),
        divide_(operation.planes == nullptr ? nullptr : DivisionFor(operation.dtype)) {}

  // Changes the reduction to a mean in which member i has weight weights[i]. If all weights are
  // equal, the result is bit-identical to that of the unweighted mean.
  void Weigh(const Operation& operation, const std::vector<uint32_t>& weights) {
    uint64_t total = 0;
    for (const uint32_t weight : weights) total += weight;
    const bool equal = std::all_of(weights.begin(), weights.end(), [&](uint32_t w) { return w == weights[0]; });
    if (equal || operation.op != KF_MEAN) return;
    blend_ = BlendFor(operation.dtype);
    for (const uint32_t weight : weights) shares_.push_back(static_cast<double>(weight) / static_cast<double>(total));
  }

  // Takes `bytes` bytes from each of the `n` members and reduces them into `to`. If the operation
  // adds up planes (planes.h), takes `bytes` bytes from each plane instead. With `stream`, the
  // result bypasses the caches. The function may change `sources`.
  void operator()(char* to, const void** sources, uint32_t n, size_t bytes, bool stream) const {
    if (!stream) {
      Apply(to, sources, n, bytes);
      return;
    }
    alignas(64) char block[kBlock];
    for (size_t at = 0; at < bytes; at += kBlock) {
      const size_t part = std::min(kBlock, bytes - at);
      Apply(block, sources, n, part);
      StreamCopy(to + at, block, part);
      const size_t count = planes_ == nullptr ? n : planes_->count();
      for (size_t i = 0; i < count; i++) sources[i] = At(sources[i], kBlock);
    }
  }

 private:
  // The number of bytes that are reduced in the first-level cache before they are written with
  // streaming stores.
  static constexpr size_t kBlock = 4096;

  void Apply(char* to, const void* const* sources, uint32_t n, size_t bytes) const {
    if (planes_ != nullptr) {
      AddUp(to, sources, bytes);
      return;
    }
    if (blend_ == nullptr) {
      reduce_(to, sources, n, bytes / unit_);
      return;
    }
    // A rank with weight 0 may contribute any values, even NaN, so its data is skipped.
    const void* counting[shm::kMaxRanks];
    double shares[shm::kMaxRanks];
    uint32_t num = 0;
    for (uint32_t i = 0; i < n; i++) {
      if (shares_[i] == 0) continue;
      counting[num] = sources[i];
      shares[num++] = shares_[i];
    }
    blend_(to, counting, shares, num, bytes / unit_);
  }

  // Runs the program that adds up the planes, block by block. Row i of `results` contains the
  // result at position i of the stack. `to` may be one of the sources, because each block is
  // written only after it has been read.
  void AddUp(char* to, const void* const* sources, size_t bytes) const {
    alignas(64) char results[Planes::kMaxDepth][kBlock];
    const void* stack[Planes::kMaxDepth + 1];
    for (size_t at = 0; at < bytes; at += kBlock) {
      const size_t part = std::min(kBlock, bytes - at);
      size_t top = 0;
      for (const int32_t step : planes_->program) {
        if (step != Planes::kAdd) {
          stack[top++] = At(sources[step], at);
          continue;
        }
        top--;
        reduce_(results[top - 1], stack + top - 1, 2, part / unit_);
        stack[top - 1] = results[top - 1];
      }
      divide_(to + at, stack[0], planes_->divisor, part / unit_);
    }
  }

  ReduceFn reduce_;
  BlendFn blend_ = nullptr;
  std::vector<double> shares_;  // the share of each member; used if blend_ is set
  size_t unit_;
  const Planes* planes_;
  DivideFn divide_;  // set if the operation adds up planes
};

// Returns the position of `cursor` in this rank's plane number `plane`. `input` is the same
// position in the operation's tensors.
inline const void* OwnPlane(const Planes& planes, uint32_t plane, const Cursor& cursor, const void* input) {
  const char* const own = planes.own[plane];
  return own == nullptr ? input : own + cursor.taken();
}

// Copies the next `bytes` bytes of this rank's data into `buffer`. For a reduce-scatter, copies
// `bytes` bytes of each rank's part. If the operation adds up planes, copies `bytes` bytes of each
// plane. The copied parts or planes begin `stride` bytes apart.
inline void Stage(const Operation& operation, uint32_t size, Cursor& cursor, size_t bytes, char* buffer, size_t stride,
                  bool stream) {
  cursor.Take(bytes, [&](const kf_tensor& tensor, size_t offset, size_t at, size_t n) {
    if (operation.planes != nullptr) {
      const Planes& planes = *operation.planes;
      for (uint32_t p = 0; p < planes.own.size(); p++) {
        CopyOut(buffer + p * stride + at, OwnPlane(planes, p, cursor, At(tensor.input, offset)), n, stream);
      }
      return;
    }
    if (operation.kind != Kind::kReduceScatter) {
      CopyOut(buffer + at, At(tensor.input, offset), n, stream);
      return;
    }
    const size_t part = tensor.count / size * SizeOf(operation.dtype);
    for (uint32_t r = 0; r < size; r++)
      CopyOut(buffer + r * stride + at, At(tensor.input, r * part + offset), n, stream);
  });
}

// Collects the sources for a reduction of planes from the buffers of all members.
class PlaneSources {
 public:
  PlaneSources(const Planes& planes, const Members& members) : planes_(planes), members_(members) {
    sources_.resize(planes.count());
  }
  // Returns the sources at position `at` in each member's buffer, in which the planes are `stride`
  // bytes apart. For this rank's own planes, the source is `own(plane)` instead.
  template <typename Own>
  const void** Gather(const char* const* buffers, size_t at, size_t stride, uint32_t rank, const Own& own) {
    size_t next = 0;
    for (size_t i = 0; i < members_.size(); i++) {
      for (uint32_t p = 0; p < planes_.of_rank[members_[i]]; p++) {
        sources_[next++] = members_[i] == rank ? own(p) : buffers[i] + p * stride + at;
      }
    }
    return sources_.data();
  }

 private:
  const Planes& planes_;
  const Members& members_;
  std::vector<const void*> sources_;
};

// Produces the next `bytes` bytes of this rank's output from the data that the members have staged.
// `buffers[i]` is the buffer of `members[i]`.
inline void Consume(const Operation& operation, const Reducer& reduce, const Members& members, uint32_t rank,
                    uint32_t size, Cursor& cursor, size_t bytes, const char* const* buffers, size_t stride,
                    bool stream) {
  const size_t unit = SizeOf(operation.dtype);
  const auto num = static_cast<uint32_t>(members.size());
  const void* sources[shm::kMaxRanks];
  if (operation.kind == Kind::kGatherTo && operation.planes != nullptr) {
    // Write the planes one after another. The root has a single tensor, so each plane is as long as
    // that tensor.
    const Planes& planes = *operation.planes;
    cursor.Take(bytes, [&](const kf_tensor& tensor, size_t offset, size_t at, size_t n) {
      size_t plane = 0;
      for (uint32_t i = 0; i < num; i++) {
        for (uint32_t p = 0; p < planes.of_rank[members[i]]; p++) {
          CopyOut(At(tensor.output, plane++ * tensor.count * unit + offset), buffers[i] + p * stride + at, n, stream);
        }
      }
    });
    return;
  }
  if (operation.planes != nullptr) {
    const Planes& planes = *operation.planes;
    PlaneSources all(planes, members);
    cursor.Take(bytes, [&](const kf_tensor& tensor, size_t offset, size_t at, size_t n) {
      const auto own = [&](uint32_t p) { return OwnPlane(planes, p, cursor, At(tensor.input, offset)); };
      reduce(At(tensor.output, offset), all.Gather(buffers, at, stride, rank, own), num, n, stream);
    });
    return;
  }
  cursor.Take(bytes, [&](const kf_tensor& tensor, size_t offset, size_t at, size_t n) {
    switch (operation.kind) {
      case Kind::kAllReduce:
      case Kind::kReduceScatter: {
        const size_t mine = operation.kind == Kind::kReduceScatter ? rank * stride : 0;
        const size_t own = operation.kind == Kind::kReduceScatter ? rank * (tensor.count / size * unit) : 0;
        for (uint32_t i = 0; i < num; i++) {
          // Read this rank's own data from the caller's memory, which is as likely to be in the
          // cache as the buffer.
          sources[i] = members[i] == rank ? At(tensor.input, own + offset) : buffers[i] + mine + at;
        }
        reduce(At(tensor.output, offset), sources, num, n, stream);
        break;
      }
      case Kind::kAllGather: {
        const size_t whole = tensor.count * unit;
        if (num < size) {
          for (uint32_t r = 0; r < size; r++) std::memset(At(tensor.output, r * whole + offset), 0, n);
        }
        for (uint32_t i = 0; i < num; i++) {
          CopyOut(At(tensor.output, members[i] * whole + offset), buffers[i] + at, n, stream);
        }
        break;
      }
      case Kind::kBroadcast:
        if (rank != operation.root) {
          const size_t root = std::find(members.begin(), members.end(), operation.root) - members.begin();
          CopyOut(At(tensor.output, offset), buffers[root] + at, n, stream);
        } else if (tensor.output != nullptr) {
          Copy(At(tensor.output, offset), At(tensor.input, offset), n);
        }
        break;
      case Kind::kReduceTo:  // the root is the last member
        for (uint32_t i = 0; i + 1 < num; i++) sources[i] = buffers[i] + at;
        if (num > 1) reduce(At(tensor.output, offset), sources, num - 1, n, stream);
        break;
      case Kind::kGatherTo: {
        const size_t whole = tensor.count * unit;
        for (uint32_t i = 0; i + 1 < num; i++) {
          CopyOut(At(tensor.output, i * whole + offset), buffers[i] + at, n, stream);
        }
        break;
      }
      case Kind::kBarrier:
        break;
    }
  });
}

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_TRANSFER_H_
