#include "base/forks.h"

#include <pthread.h>

#include "base/error.h"

namespace kungfu {

std::atomic<uint32_t> OneProcess::forks_{0};

namespace {

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { OneProcess::CountFork(); });

}  // namespace

void OneProcess::Throw(const char* what) {
  throw Error(KF_INVALID, Text("a forked child is not a member of the cluster and can't ", what));
}

}  // namespace kungfu
