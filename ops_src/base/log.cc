#include "base/log.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/forks.h"
#include "base/threads.h"

namespace kungfu {
namespace {

constexpr auto kApart = std::chrono::seconds(1);
constexpr size_t kMostLines = 100;  // the queue's limit; the queue grows only if the handler takes more than one second
                                    // per line

void ToStderr(const std::string& line) {
  const std::string text = "kungfu: " + line + "\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
}

// Never destroyed: the log's thread is never joined, so it may outlive static destructors.
class Log {
 public:
  static Log& Get() {
    static Log* const log = new Log;
    return *log;
  }

  void Set(LogHandler handler) {
    if (process_.IsCopy()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    std::swap(handler_, handler);
    idle_.wait(lock, [this] { return !busy_; });
  }

  void Say(const std::string& line) {
    if (process_.IsCopy()) return;
    std::lock_guard<std::mutex> guard(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (lines_.size() >= kMostLines || (said_any_ && now - said_ < kApart)) {
      left_out_++;
      return;
    }
    said_any_ = true;
    said_ = now;
    lines_.push_back(left_out_ == 0 ? line : Text(line, " (and ", left_out_, " lines left out before this one)"));
    left_out_ = 0;
    if (!started_) Start();
    said_more_.notify_one();
  }

 private:
  // The caller holds mutex_.
  void Start() {
    try {
      StartThread("kungfu-log", [this] { Serve(); }).detach();
      started_ = true;
    } catch (...) {  // no thread could be started, so the lines stay queued
    }
  }

  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      said_more_.wait(lock, [this] { return !lines_.empty(); });
      const std::string line = std::move(lines_.front());
      lines_.pop_front();
      LogHandler handler = handler_;
      busy_ = true;
      lock.unlock();
      try {
        handler ? handler(line) : ToStderr(line);
      } catch (...) {
        ToStderr(line);
      }
      handler = nullptr;
      lock.lock();
      busy_ = false;
      idle_.notify_all();
    }
  }

  const OneProcess process_;
  std::mutex mutex_;
  std::condition_variable said_more_, idle_;
  // Guarded by mutex_:
  LogHandler handler_;
  std::deque<std::string> lines_;
  std::chrono::steady_clock::time_point said_;
  bool said_any_ = false;
  size_t left_out_ = 0;
  bool started_ = false;
  bool busy_ = false;
};

}  // namespace

void SetLog(LogHandler handler) { Log::Get().Set(std::move(handler)); }

void LogSometimes(const std::string& line) noexcept {
  try {
    Log::Get().Say(line);
  } catch (...) {  // there is no memory for the line
  }
}

}  // namespace kungfu
