#include "base/termination.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>

namespace kungfu {
namespace {

std::atomic<pid_t> process{0};  // the process in which the next SIGTERM counts as a request; 0 if no request is
                                // expected any more
std::atomic<int> requests{-1};

// A signal handler, so it calls only async-signal-safe functions.
void Handle(int number) {
  const int error = errno;
  pid_t self = getpid();
  if (process.compare_exchange_strong(self, 0)) {
    [[maybe_unused]] const ssize_t written = write(requests, "", 1);
  } else {
    signal(number, SIG_DFL);
    kill(getpid(), number);
  }
  errno = error;
}

}  // namespace

void CatchSigterm(int fd) {
  requests = fd;
  process = getpid();
  struct sigaction action = {};
  action.sa_handler = &Handle;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
}

}  // namespace kungfu
