// Log lines of the runtime that a person reads. They are rare, and are written one at a time.
#ifndef KUNGFU_BASE_LOG_H_
#define KUNGFU_BASE_LOG_H_

#include <functional>
#include <string>

namespace kungfu {

// Accepts a line without its line end. It is called on a separate thread, never on a thread that runs a collective. No
// thread waits for the handler, so it may block (on Python's lock, on a slow disk).
using LogHandler = std::function<void(const std::string& line)>;

// Sets the log handler. Null, the default, means that lines go to stderr. Returns when the previous handler no longer
// runs, so a handler must not call this function.
void SetLog(LogHandler handler);

// Queues the line for the handler. Each process logs at most one line a second; the next logged line states how many
// were left out. Never waits for the handler, and never throws.
void LogSometimes(const std::string& line) noexcept;

}  // namespace kungfu

#endif  // KUNGFU_BASE_LOG_H_
