// SIGTERM as a request that any thread can wait for. Python's handlers run in the main thread alone, which may be busy
// elsewhere for long, and only that thread can set one.
#ifndef KUNGFU_BASE_TERMINATION_H_
#define KUNGFU_BASE_TERMINATION_H_

#include "base/error.h"

namespace kungfu {

// From now on this process's first SIGTERM writes a byte to `fd`, a pipe that stays open. The second one has its
// default action, as each has in a forked child.
KF_API void CatchSigterm(int fd);

}  // namespace kungfu

#endif  // KUNGFU_BASE_TERMINATION_H_
