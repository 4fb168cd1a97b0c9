// SIGTERM as a request for which any thread can wait. Python runs its handlers only in the main thread, which may be
// busy for a long time, and only the main thread can set a handler.
#ifndef KUNGFU_BASE_TERMINATION_H_
#define KUNGFU_BASE_TERMINATION_H_

#include "base/error.h"

namespace kungfu {

// From now on this process's first SIGTERM writes a byte to `fd`, a pipe that stays open. The second SIGTERM has its
// default action. In a forked child, each SIGTERM has its default action.
KF_API void CatchSigterm(int fd);

}  // namespace kungfu

#endif  // KUNGFU_BASE_TERMINATION_H_
