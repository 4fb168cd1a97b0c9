// The last failure, for callers that can't get an exception: callers of the C ABI, and Python above MindSpore, to
// which a kernel can raise nothing but a RuntimeError.
#ifndef KUNGFU_C_API_FAILURE_H_
#define KUNGFU_C_API_FAILURE_H_

#include <exception>
#include <string>

#include "base/error.h"

namespace kungfu {

// Keeps what `error` says as this thread's and this process's last failure and returns its status. Never throws.
kf_status RecordFailure(const std::exception& error) noexcept;

// Runs what stands behind a function of the C ABI, which no exception leaves.
template <typename Body>
kf_status Guarded(const Body& body) noexcept {
  try {
    body();
    return KF_OK;
  } catch (const std::exception& error) {
    return RecordFailure(error);
  } catch (...) {
    return RecordFailure(Error(KF_INTERNAL, "something that is no exception was thrown"));
  }
}

const char* LastFailureOfThread() noexcept;
std::string LastFailureOfProcess();  // empty: none yet

}  // namespace kungfu

#endif  // KUNGFU_C_API_FAILURE_H_
