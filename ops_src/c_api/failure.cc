#include "c_api/failure.h"

#include <mutex>

namespace kungfu {
namespace {

std::string& OfThread() {
  static thread_local std::string message;
  return message;
}

struct Shared {
  std::mutex mutex;
  std::string message;  // guarded by mutex
};

Shared& OfProcess() {
  static Shared* const shared = new Shared;
  return *shared;
}

}  // namespace

kf_status RecordFailure(const std::exception& error) noexcept {
  try {
    const auto* typed = dynamic_cast<const Error*>(&error);
    const Error described = typed != nullptr ? *typed : Error(KF_INTERNAL, error.what());
    OfThread() = described.Described();
    Shared& shared = OfProcess();
    std::lock_guard<std::mutex> guard(shared.mutex);
    shared.message = OfThread();
    return described.status();
  } catch (...) {  // no memory for the text
    return KF_INTERNAL;
  }
}

const char* LastFailureOfThread() noexcept { return OfThread().c_str(); }

std::string LastFailureOfProcess() {
  Shared& shared = OfProcess();
  std::lock_guard<std::mutex> guard(shared.mutex);
  return shared.message;
}

}  // namespace kungfu
