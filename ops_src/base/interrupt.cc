#include "base/interrupt.h"

namespace kungfu {
namespace {

thread_local void (*check_of_thread)() = nullptr;

}  // namespace

InterruptCheck::InterruptCheck(void (*check)()) : outer_(check_of_thread) { check_of_thread = check; }

InterruptCheck::~InterruptCheck() { check_of_thread = outer_; }

void InterruptCheck::Run() {
  if (IsSet()) check_of_thread();
}

bool InterruptCheck::IsSet() { return check_of_thread != nullptr; }

}  // namespace kungfu
