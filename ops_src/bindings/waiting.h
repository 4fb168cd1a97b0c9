// Waits in the runtime that Python's signals can end.
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

// Called with the GIL released, by Python's main thread, which is the only one that runs handlers of signals.
inline void CheckSignals() {
  py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() == 0) return;
  // The exception stays set in this thread, for the translator.
  throw Interrupted(reinterpret_cast<PyTypeObject*>(PyErr_Occurred())->tp_name);
}

// Asked around every operation, so the kernel is asked once a thread; a fork makes its thread the main one.
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

// Runs what may wait, with the GIL released. A signal's handler runs meanwhile, and what it raises ends the wait.
template <typename Body>
void Waiting(const Body& body) {
  py::gil_scoped_release release;
  const InterruptCheck check(CheckOfThread());
  body();
}

}  // namespace kungfu

#endif  // KUNGFU_BINDINGS_WAITING_H_
