#include "runtime/stillness.h"

#include <dirent.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <utility>

namespace kungfu {
namespace {

// The maximum CPU use between two calls, as a fraction of one core. Threads that only wake up on a
// timer use less than this.
constexpr double kMostUsed = 0.1;

std::chrono::nanoseconds UsedBy(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// Returns the thread's state ('S' if the thread sleeps), or 0 if the state can't be read.
char StateOf(const std::string& task) {
  std::ifstream file(task + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t end = text.rfind(')');  // the last bracket ends the thread's name, which may itself contain brackets
  return end == std::string::npos || end + 2 >= text.size() ? '\0' : text[end + 2];
}

// Returns the thread's number of voluntary and involuntary context switches, or -1 if they can't be read.
int64_t SwitchesOf(const std::string& task) {
  std::ifstream file(task + "/status");
  int64_t sum = 0, found = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.find("ctxt_switches:") == std::string::npos) continue;
    sum += std::atoll(line.c_str() + line.find(':') + 1);
    found++;
  }
  return found == 2 ? sum : -1;
}

}  // namespace

// A thread that ends between the listing of its folder and the reading of its state counts as not
// sleeping, because it has just run.
bool Stillness::AllSleep(const std::vector<pid_t>& waiting) const {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(tasks_.c_str()), closedir);
  if (folder == nullptr) return false;
  const auto own = static_cast<pid_t>(syscall(SYS_gettid));
  while (const dirent* const entry = readdir(folder.get())) {
    const pid_t thread = std::atoi(entry->d_name);
    if (thread == 0 || thread == own || std::count(waiting.begin(), waiting.end(), thread) > 0) continue;
    if (StateOf(tasks_ + "/" + entry->d_name) != 'S') return false;
  }
  return true;
}

bool Stillness::Look(const std::vector<pid_t>& waiting, bool main_waits) {
  const auto now = std::chrono::steady_clock::now();
  const std::chrono::nanoseconds used = UsedBy(CLOCK_PROCESS_CPUTIME_ID) - UsedBy(CLOCK_THREAD_CPUTIME_ID);
  const bool idle = used - std::exchange(used_, used) < kMostUsed * (now - std::exchange(looked_, now));
  const pid_t main = getpid();
  bool main_sleeps = std::count(waiting.begin(), waiting.end(), main) > 0;
  if (main_sleeps) {
    main_awoke_ = -1;
  } else {
    const int64_t awoke = main_waits ? SwitchesOf(tasks_ + "/" + std::to_string(main)) : -1;
    const int64_t before = std::exchange(main_awoke_, awoke);
    main_sleeps = awoke >= 0 && before == awoke;
  }
  return idle && main_sleeps && AllSleep(waiting);
}

}  // namespace kungfu
