// Whether this process stands still: each of its threads sleeps.
#ifndef KUNGFU_RUNTIME_STILLNESS_H_
#define KUNGFU_RUNTIME_STILLNESS_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace kungfu {

// As the kernel has it in /proc. What can't be read doesn't stand still. For one thread at a time.
class Stillness {
 public:
  explicit Stillness(std::string tasks = "/proc/self/task") : tasks_(std::move(tasks)) {}

  // Whether no thread runs now, nor has taken more than a little of a core since the last call, which was a short time
  // ago. The caller counts for nothing, nor do `waiting`, which look around now and then. The main thread, if it isn't
  // one of those, has to be said to wait, and must not have been awake since the last call.
  bool Look(const std::vector<pid_t>& waiting, bool main_waits);

 private:
  bool AllSleep(const std::vector<pid_t>& waiting) const;

  const std::string tasks_;
  std::chrono::steady_clock::time_point looked_{};
  std::chrono::nanoseconds used_{0};
  int64_t main_awoke_ = -1;  // how often, at the last look; -1: that isn't known
};

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_STILLNESS_H_
