#include "runtime/heartbeat.h"

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/threads.h"

namespace kungfu {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);

}  // namespace

struct Heartbeat::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<Communicator> communicator;  // guarded by mutex
  bool stop = false;                           // guarded by mutex
};

Heartbeat::~Heartbeat() {
  if (shared_ == nullptr || process_->IsCopy()) return;
  std::lock_guard<std::mutex> guard(shared_->mutex);
  shared_->stop = true;
  shared_->communicator.reset();
  shared_->changed.notify_all();
}

void Heartbeat::Follow(std::shared_ptr<Communicator> communicator) {
  if (shared_ != nullptr && process_->IsCopy()) {
    shared_ = nullptr;  // doesn't destroy the state, because the parent's thread has left a reference
  }
  if (shared_ != nullptr) {
    std::lock_guard<std::mutex> guard(shared_->mutex);
    shared_->communicator = std::move(communicator);
    return;
  }
  if (!communicator->is_member()) return;
  shared_ = std::make_shared<Shared>();
  process_.emplace();
  shared_->communicator = std::move(communicator);
  StartThread("kungfu-beat", [shared = shared_] {
    std::unique_lock<std::mutex> lock(shared->mutex);
    while (!shared->stop) {
      if (shared->communicator != nullptr) shared->communicator->Beat();
      shared->changed.wait_for(lock, kInterval);
    }
  }).detach();
}

}  // namespace kungfu
