// What the runtime has to tell a person while it goes on: one line at a time, rarely.
#ifndef KUNGFU_BASE_LOG_H_
#define KUNGFU_BASE_LOG_H_

#include <functional>
#include <string>

namespace kungfu {

// Takes a line without its end. Called on a thread of its own, never on one that runs a collective: it may wait for
// anything (Python's lock, a slow disk), and no thread waits for it.
using LogHandler = std::function<void(const std::string& line)>;

// Null, the default: lines go to stderr. Returns when the handler before it runs no more (so not to be called from it).
void SetLog(LogHandler handler);

// Hands the line over; at most one a second from this process, those in between are counted in the next. Never waits
// for a reader, and throws nothing.
void LogSometimes(const std::string& line) noexcept;

}  // namespace kungfu

#endif  // KUNGFU_BASE_LOG_H_
