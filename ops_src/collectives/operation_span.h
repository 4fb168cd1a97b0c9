// Adds the events of collectives to the trace of this process.
#ifndef KUNGFU_COLLECTIVES_OPERATION_SPAN_H_
#define KUNGFU_COLLECTIVES_OPERATION_SPAN_H_

#include <cstdint>
#include <string>

#include "base/trace.h"
#include "collectives/dtype.h"
#include "collectives/operation.h"

namespace kungfu {

// One run of an operation, or of a part of an operation, on the calling thread. The run begins when
// this object is created.
class OperationSpan {
 public:
  explicit OperationSpan(uint64_t cluster_version)
      : version_(cluster_version),
        began_ns_(Trace::On() ? Trace::Now() : 0),
        waited_ns_(began_ns_ == 0 ? 0 : Trace::WaitedByThread()) {}

  // Records that `operation` begins.
  void Began(const Operation& operation) const {
    if (began_ns_ != 0 && IsOfGradients(operation)) Trace::ReductionBegins(began_ns_);
  }
  // Adds the event to the trace. Call this function after the outputs have been written. A failed
  // operation has no event.
  void Ended(const Operation& operation) const {
    if (began_ns_ == 0) return;
    const uint64_t now = Trace::Now(), waited = Trace::WaitedByThread() - waited_ns_;
    const uint64_t bytes = CountOf(operation) * SizeOf(operation.dtype);
    if (operation.part.of != nullptr) {
      static constexpr const char* kStages[] = {"to host", "commit", "result", "error"};
      const auto name = Trace::Name(Joined(kStages[static_cast<uint8_t>(operation.part.stage)], operation.name));
      Trace::Add({began_ns_, now, {bytes, 0, 0, waited}, name, Trace::What::kPart});
      return;
    }
    uint64_t n = 0;
    const auto name = Trace::NameOperation(Joined(NameOf(operation.kind), operation.name), version_, &n);
    Trace::Add({began_ns_, now, {bytes, n, version_, waited}, name, Trace::What::kOperation});
    IsOfGradients(operation) ? Trace::ReductionEnds(now) : Trace::OtherWorkEnds(now);
  }

  static bool IsOfGradients(const Operation& operation) {
    return operation.part.of == nullptr && (operation.weighting.applies || operation.planes != nullptr);
  }

 private:
  static std::string Joined(const char* what, const char* name) { return std::string(what) + ' ' + name; }

  const uint64_t version_, began_ns_, waited_ns_;
};

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_OPERATION_SPAN_H_
