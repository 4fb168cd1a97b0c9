#include "base/termination.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>

namespace kungfu {
namespace {

std::atomic<pid_t> owner{0};       // the process that called CatchSigterm
std::atomic<pid_t> supervisor{0};  // the process that ends the job's workers
std::atomic<bool> requested{false};
std::atomic<time_t> requested_at{0};  // seconds of CLOCK_MONOTONIC
constexpr time_t kSameSignal = 2;     // children that received the same SIGTERM end within this many seconds
std::atomic<int> requests{-1};

void ActByDefault() {
  signal(SIGTERM, SIG_DFL);
  kill(getpid(), SIGTERM);
}

time_t Now() {
  struct timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec;
}

pid_t SenderOf(const siginfo_t& info) {
  const bool is_sent = info.si_code == SI_USER || info.si_code == SI_TKILL || info.si_code == SI_QUEUE;
  return is_sent ? info.si_pid : 0;
}

// A signal handler, so it calls only async-signal-safe functions.
void Handle(int /*number*/, siginfo_t* info, void* /*context*/) {
  const int error = errno;
  const pid_t self = getpid();
  const pid_t sender = SenderOf(*info);
  if (self != owner || (sender != 0 && sender == supervisor)) {
    ActByDefault();
  } else if (sender == self) {
    if (!requested || Now() - requested_at > kSameSignal) {
      ActByDefault();
    }
  } else {
    if (!requested) {
      requested_at = Now();
    }
    if (requested.exchange(true)) {
      ActByDefault();
    } else {
      [[maybe_unused]] const ssize_t written = write(requests, "", 1);
    }
  }
  errno = error;
}

}  // namespace

void CatchSigterm(int fd, int supervisor_pid) {
  requests = fd;
  supervisor = supervisor_pid;
  requested = false;
  owner = getpid();
  struct sigaction action = {};
  action.sa_sigaction = &Handle;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  sigaction(SIGTERM, &action, nullptr);
}

void EndBySigterm() { ActByDefault(); }

}  // namespace kungfu
