// Threads that the runtime starts.
#ifndef KUNGFU_BASE_THREADS_H_
#define KUNGFU_BASE_THREADS_H_

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace kungfu {

// Runs `body` on a new thread called `name` (at most 15 characters). The thread blocks all signals,
// so that the program's threads receive them. Throws the same exceptions as the constructor of
// std::thread.
template <typename Body>
std::thread StartThread(const char* name, Body body) {
  struct Blocked {
    Blocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  } blocked;
  return std::thread([name, body = std::move(body)] {
    pthread_setname_np(pthread_self(), name);
    body();
  });
}

}  // namespace kungfu

#endif  // KUNGFU_BASE_THREADS_H_
