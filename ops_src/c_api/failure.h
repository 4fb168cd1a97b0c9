// Stores the last failure for callers that receive no typed exception: callers of the C ABI, and
// Python code that runs MindSpore's kernels, which can raise only RuntimeError.
#ifndef KUNGFU_C_API_FAILURE_H_
#define KUNGFU_C_API_FAILURE_H_

#include <exception>
#include <string>

#include "base/error.h"

namespace kungfu {

// Records `error` as the last failure of both this thread and this process. Returns the error's
// status. Never throws.
kf_status RecordFailure(const std::exception& error) noexcept;

// Runs the body of a C ABI function, and turns an exception into a status.
template <typename Body>
kf_status Guarded(const Body& body) noexcept {
  try {
    body();
    return KF_OK;
  } catch (const std::exception& error) {
    return RecordFailure(error);
  } catch (...) {
    return RecordFailure(Error(KF_INTERNAL, "an object that isn't a std::exception was thrown"));
  }
}

const char* LastFailureOfThread() noexcept;
std::string LastFailureOfProcess();  // empty if nothing has failed

}  // namespace kungfu

#endif  // KUNGFU_C_API_FAILURE_H_
