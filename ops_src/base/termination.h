// Treats SIGTERM as a request for which any thread can wait. Python isn't enough: only its main
// thread can set and run signal handlers, and that thread may be busy for a long time.
#ifndef KUNGFU_BASE_TERMINATION_H_
#define KUNGFU_BASE_TERMINATION_H_

#include "base/error.h"

namespace kungfu {

// After this call, this process's first SIGTERM writes a byte to `fd`, a pipe that must stay open.
// The second SIGTERM has its default action. The sender decides in these cases:
//
// - The process `supervisor` (0: none) ends workers: its SIGTERM has its default action.
// - MindSpore sends its own process a SIGTERM if a child of its dataset has ended by a signal, or
//   after a SIGINT. This isn't a request: it has its default action. In the first two seconds after
//   a request it is ignored, because the child may have got the same SIGTERM as this process.
//
// In a forked child, each SIGTERM has its default action.
KF_API void CatchSigterm(int fd, int supervisor);

// Ends this process by the default action of SIGTERM.
KF_API void EndBySigterm();

}  // namespace kungfu

#endif  // KUNGFU_BASE_TERMINATION_H_
