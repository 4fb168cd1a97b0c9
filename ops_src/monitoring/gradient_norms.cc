#include "monitoring/gradient_norms.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "collectives/dtype.h"

namespace kungfu::monitoring {
namespace {

constexpr size_t kLanes = 16;    // independent partial sums, which the compiler keeps in vector registers
constexpr size_t kBlock = 1024;  // elements that are summed in float32

template <typename T>
double Squares(const T* x, uint64_t count) {
  double sum = 0;
  for (uint64_t at = 0; at < count; at += kBlock) {
    const uint64_t n = std::min<uint64_t>(kBlock, count - at);
    T lanes[kLanes] = {};
    uint64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (size_t k = 0; k < kLanes; k++) lanes[k] += x[at + i + k] * x[at + i + k];
    }
    for (; i < n; i++) lanes[0] += x[at + i] * x[at + i];
    for (const T lane : lanes) sum += lane;
  }
  return sum;
}

float Widened(uint16_t bits, kf_dtype dtype) {
  uint32_t wide;
  if (dtype == KF_BFLOAT16) {
    wide = static_cast<uint32_t>(bits) << 16;
  } else {
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
    float scaled;
    std::memcpy(&scaled, &magnitude, sizeof scaled);
    scaled *= 0x1p112f;  // corrects the exponent's bias, and makes subnormal numbers normal
    std::memcpy(&wide, &scaled, sizeof wide);
    if ((bits & 0x7c00u) == 0x7c00u) wide = magnitude | 0x7f800000u;
  }
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

double Squares16(const uint16_t* x, uint64_t count, kf_dtype dtype) {
  float block[kBlock];
  double sum = 0;
  for (uint64_t at = 0; at < count; at += kBlock) {
    const uint64_t n = std::min<uint64_t>(kBlock, count - at);
    for (uint64_t i = 0; i < n; i++) block[i] = Widened(x[at + i], dtype);
    sum += Squares(block, n);
  }
  return sum;
}

}  // namespace

double ThreadCpuSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double SquaredNorm(const void* data, uint64_t count, kf_dtype dtype) {
  if (dtype == KF_FLOAT32) return Squares(static_cast<const float*>(data), count);
  if (dtype == KF_FLOAT64) return Squares(static_cast<const double*>(data), count);
  if (IsFloat(dtype)) return Squares16(static_cast<const uint16_t*>(data), count, dtype);
  throw Error(KF_TYPE, "the norm of gradients requires a float dtype");
}

GradientNorms& GradientNorms::Get() {
  static GradientNorms* const norms = new GradientNorms;  // never destroyed, because threads may outlive static
                                                          // destructors
  return *norms;
}

void GradientNorms::Watch(const std::string& name) {
  const std::lock_guard<std::mutex> guard(mutex_);
  name_ = name;
  sums_ = {};
  Install(name.empty() ? nullptr : this);
}

Norms GradientNorms::Take() {
  const std::lock_guard<std::mutex> guard(mutex_);
  const Norms taken = sums_;
  sums_ = {};
  return taken;
}

bool GradientNorms::Watching() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return !name_.empty();
}

void GradientNorms::Add(const Norms& norms) {
  const std::lock_guard<std::mutex> guard(mutex_);
  sums_.brought += norms.brought;
  sums_.reduced += norms.reduced;
  sums_.elements += norms.elements;
  sums_.cpu_s += norms.cpu_s;
}

bool GradientNorms::Matches(const Operation& operation) {
  if (operation.kind != Kind::kAllReduce || (operation.op != KF_SUM && operation.op != KF_MEAN)) return false;
  if (!IsFloat(operation.dtype) || operation.planes != nullptr) return false;
  const std::lock_guard<std::mutex> guard(mutex_);
  if (name_.empty()) return false;
  for (const char* at = operation.name; (at = std::strstr(at, name_.c_str())) != nullptr; at++) {
    const char end = at[name_.size()];
    if ((at == operation.name || at[-1] == '/') && (end == '\0' || end == '/')) return true;
  }
  return false;
}

// Measures one operation's gradients before and after the operation.
class GradientNorms::Measured : public Observation {
 public:
  Measured(GradientNorms& all, const Operation& operation) : all_(all), operation_(operation) {
    const double began = ThreadCpuSeconds();
    for (size_t i = 0; i < operation.num_tensors; i++) {
      const kf_tensor& tensor = operation.tensors[i];
      norms_.brought += SquaredNorm(tensor.input, tensor.count, operation.dtype);
      norms_.elements += tensor.count;
    }
    norms_.cpu_s = ThreadCpuSeconds() - began;
  }

  void Done(uint32_t size) override {
    const double began = ThreadCpuSeconds();
    for (size_t i = 0; i < operation_.num_tensors; i++) {
      norms_.reduced += SquaredNorm(operation_.tensors[i].output, operation_.tensors[i].count, operation_.dtype);
    }
    if (operation_.op == KF_SUM) norms_.reduced /= static_cast<double>(size) * size;
    norms_.cpu_s += ThreadCpuSeconds() - began;
    all_.Add(norms_);
  }

 private:
  GradientNorms& all_;
  const Operation& operation_;
  Norms norms_;
};

std::unique_ptr<Observer::Observation> GradientNorms::Begin(const Operation& operation) {
  return Matches(operation) ? std::make_unique<Measured>(*this, operation) : nullptr;
}

}  // namespace kungfu::monitoring
