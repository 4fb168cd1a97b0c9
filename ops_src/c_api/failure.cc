#include "c_api/failure.h"

#include <mutex>

namespace kungfu {
namespace {

thread_local std::string of_thread;

// Never destroyed, because threads may outlive static destructors.
std::mutex& mutex = *new std::mutex;
std::string& of_process = *new std::string;  // guarded by mutex

}  // namespace

kf_status RecordFailure(const std::exception& error) noexcept {
  try {
    const auto* typed = dynamic_cast<const Error*>(&error);
    const Error described = typed != nullptr ? *typed : Error(KF_INTERNAL, error.what());
    of_thread = described.Described();
    std::lock_guard<std::mutex> guard(mutex);
    of_process = of_thread;
    return described.status();
  } catch (...) {  // there is no memory for the message
    return KF_INTERNAL;
  }
}

const char* LastFailureOfThread() noexcept { return of_thread.c_str(); }

std::string LastFailureOfProcess() {
  std::lock_guard<std::mutex> guard(mutex);
  return of_process;
}

}  // namespace kungfu
