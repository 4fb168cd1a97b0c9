// The runtime's log lines for human readers. The lines are rare, and are written one at a time.
#ifndef KUNGFU_BASE_LOG_H_
#define KUNGFU_BASE_LOG_H_

#include <functional>
#include <string>

namespace kungfu {

// Accepts a line without a newline at its end. The log calls the handler on a separate thread,
// never on a thread that runs a collective. No thread waits for the handler, so the handler may
// block, for example on Python's lock or on a slow disk.
using LogHandler = std::function<void(const std::string& line)>;

// Sets the log handler. If it is null, which is the default, lines go to stderr. Returns when the
// previous handler has stopped running, so a handler must not call this function.
void SetLog(LogHandler handler);

// Queues the line for the handler. Each process logs at most one line per second. The log omits
// other lines, and the next logged line contains the number of omitted lines. Never waits for the
// handler, and never throws.
void LogSometimes(const std::string& line) noexcept;

}  // namespace kungfu

#endif  // KUNGFU_BASE_LOG_H_
