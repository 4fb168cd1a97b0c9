// Detects whether this process is idle, that is, whether all its threads sleep.
#ifndef KUNGFU_RUNTIME_STILLNESS_H_
#define KUNGFU_RUNTIME_STILLNESS_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace kungfu {

// Reads the threads' states from /proc. If a state can't be read, the process doesn't count as
// idle. Not thread-safe.
class Stillness {
 public:
  explicit Stillness(std::string tasks = "/proc/self/task") : tasks_(std::move(tasks)) {}

  // Returns true if the process is idle: no thread is running now, and the threads have used at
  // most kMostUsed of a core since the last call. Call it at short intervals. The function ignores
  // the calling thread and the threads in `waiting`, which wake up regularly. If the main thread
  // isn't in `waiting`, `main_waits` must be true, and the main thread must not have run since the
  // last call.
  bool Look(const std::vector<pid_t>& waiting, bool main_waits);

 private:
  bool AllSleep(const std::vector<pid_t>& waiting) const;

  const std::string tasks_;
  std::chrono::steady_clock::time_point looked_{};
  std::chrono::nanoseconds used_{0};
  int64_t main_awoke_ = -1;  // the number of the main thread's context switches at the last call; -1 if unknown
};

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_STILLNESS_H_
