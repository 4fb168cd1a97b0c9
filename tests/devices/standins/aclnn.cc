// libnnopbase.so and libopapi.so: the division in place, which takes a workspace as the real one may.
#include <cmath>
#include <cstring>

#include "simulated.h"

namespace {

enum { kSuccess = 0, kParameter = 161002 };
constexpr int kFloat32 = 0, kFloat16 = 1, kBfloat16 = 27;
constexpr uint64_t kWorkspaceBytes = 512;

struct Tensor {
  void* data;
  uint64_t count;
  int dtype;
};
struct Executor {
  Tensor tensor;
  float divisor;
};

#ifdef __aarch64__
using Half = __fp16;  // GCC's C++ knows _Float16 there from version 13 on
#else
using Half = _Float16;
#endif

float FromHalf(Half x) { return static_cast<float>(x); }

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INJECT(name) \
  if (const int code = standin::Injected(name); code != 0) return code

EXPORT Tensor* aclCreateTensor(const int64_t* shape, uint64_t rank, int dtype, const int64_t* stride, int64_t offset,
                               int format, const int64_t* storage, uint64_t storage_rank, void* data) {
  if (rank != 1 || storage_rank != 1 || stride[0] != 1 || offset != 0 || format != 2 || storage[0] != shape[0]) {
    standin::Violation("aclCreateTensor: another layout than that of one contiguous dimension");
  }
  return new Tensor{data, static_cast<uint64_t>(shape[0]), dtype};
}
EXPORT int aclDestroyTensor(const Tensor* tensor) {
  delete tensor;
  return kSuccess;
}
EXPORT float* aclCreateScalar(const void* value, int dtype) {
  if (dtype != kFloat32) standin::Violation("aclCreateScalar: another type than float32");
  auto* scalar = new float;
  std::memcpy(scalar, value, sizeof *scalar);
  return scalar;
}
EXPORT int aclDestroyScalar(const float* scalar) {
  delete scalar;
  return kSuccess;
}
EXPORT int aclnnInplaceDivsGetWorkspaceSize(Tensor* tensor, const float* scalar, uint64_t* bytes, Executor** executor) {
  INJECT("aclnnInplaceDivsGetWorkspaceSize");
  if (tensor->dtype != kFloat32 && tensor->dtype != kFloat16 && tensor->dtype != kBfloat16) return kParameter;
  *bytes = kWorkspaceBytes;
  *executor = new Executor{*tensor, *scalar};
  return kSuccess;
}
EXPORT int aclnnInplaceDivs(void* workspace, uint64_t bytes, Executor* executor, void* stream) {
  INJECT("aclnnInplaceDivs");
  const Executor division = *executor;
  delete executor;
  if (bytes < kWorkspaceBytes) standin::Violation("aclnnInplaceDivs: a workspace that is too small");
  standin::Task task;
  const size_t unit = division.tensor.dtype == kFloat32 ? 4 : 2;
  task.ranges.push_back({division.tensor.data, division.tensor.count * unit, true});
  task.ranges.push_back({workspace, bytes, true});
  task.run = [division](const std::vector<char*>& ranges) {
    for (uint64_t i = 0; i < division.tensor.count; i++) {
      if (division.tensor.dtype == kFloat32) {
        reinterpret_cast<float*>(ranges[0])[i] /= division.divisor;
      } else if (division.tensor.dtype == kFloat16) {
        auto& x = reinterpret_cast<Half*>(ranges[0])[i];
        x = static_cast<Half>(FromHalf(x) / division.divisor);
      } else {
        auto& bits = reinterpret_cast<uint16_t*>(ranges[0])[i];
        uint32_t word = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &word, 4);
        value /= division.divisor;
        std::memcpy(&word, &value, 4);
        bits = static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
      }
    }
  };
  return standin::Enqueue(stream, task) == standin::Status::kOk ? kSuccess : kParameter;
}
