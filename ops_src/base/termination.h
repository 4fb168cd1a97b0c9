// Treats SIGTERM as a request for which any thread can wait. Python isn't enough: only its main
// thread can set and run signal handlers, and that thread may be busy for a long time.
#ifndef KUNGFU_BASE_TERMINATION_H_
#define KUNGFU_BASE_TERMINATION_H_

#include "base/error.h"

namespace kungfu {

// After this call, this process's first SIGTERM writes a byte to `fd`, a pipe that must stay open.
// The second SIGTERM has its default action. In a forked child, each SIGTERM has its default
// action.
KF_API void CatchSigterm(int fd);

}  // namespace kungfu

#endif  // KUNGFU_BASE_TERMINATION_H_
