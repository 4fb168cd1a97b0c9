// Lets Python's signals end a wait in the runtime.
#ifndef KUNGFU_BINDINGS_WAITING_H_
#define KUNGFU_BINDINGS_WAITING_H_

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <optional>

#include "base/forks.h"
#include "base/interrupt.h"

namespace kungfu {

namespace py = pybind11;

// Runs the handlers of pending signals. Called with the GIL released. The calling thread must be
// Python's main thread, because Python runs signal handlers only there.
inline void CheckSignals() {
  py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() == 0) return;
  // The exception stays set in this thread. The exception translator passes it on to Python.
  throw Interrupted(reinterpret_cast<PyTypeObject*>(PyErr_Occurred())->tp_name);
}

// Returns true if this is the main thread. Every operation calls this function, so the system call
// is made only once per thread. After a fork, the forking thread is the child's main thread.
inline bool IsMainThread() {
  struct Known {
    OneProcess in;
    bool is_main = static_cast<pid_t>(syscall(SYS_gettid)) == getpid();
  };
  thread_local std::optional<Known> known;
  if (!known || known->in.IsCopy()) known.emplace();
  return known->is_main;
}

inline void (*CheckOfThread())() { return IsMainThread() ? &CheckSignals : nullptr; }

// Runs `body`, which may wait, with the GIL released. Python's signal handlers can run during the
// wait. If a handler raises an exception, the exception ends the wait.
template <typename Body>
void Waiting(const Body& body) {
  py::gil_scoped_release release;
  const InterruptCheck check(CheckOfThread());
  body();
}

}  // namespace kungfu

#endif  // KUNGFU_BINDINGS_WAITING_H_
