// Treats SIGTERM as a request that any thread can wait for. Python's handlers run only in its main
// thread, which may be busy for a long time.
#ifndef KUNGFU_BASE_TERMINATION_H_
#define KUNGFU_BASE_TERMINATION_H_

#include "base/error.h"

namespace kungfu {

// After this call, this process's first SIGTERM writes a byte to `fd`, a pipe that must stay open.
// The second SIGTERM has its default action. The effect also depends on the sender:
//
// - A SIGTERM from the process `supervisor` has its default action. 0 means that there is no
//   supervisor.
// - MindSpore sends SIGTERM to its own process after a SIGINT, or if a signal has killed a child
//   process of its dataset. This SIGTERM isn't a request. It has its default action, except that it
//   is ignored in the first two seconds after a request, because the child may have received the
//   same SIGTERM as this process.
//
// In a forked child, each SIGTERM has its default action.
KF_API void CatchSigterm(int fd, int supervisor);

// Ends this process by the default action of SIGTERM.
KF_API void EndBySigterm();

}  // namespace kungfu

#endif  // KUNGFU_BASE_TERMINATION_H_
