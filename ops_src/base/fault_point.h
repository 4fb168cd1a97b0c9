// Points in the code at which tests can make a process exit, stop or wait. In a build without
// tests, the points cost nothing.
#ifndef KUNGFU_BASE_FAULT_POINT_H_
#define KUNGFU_BASE_FAULT_POINT_H_

#ifdef KUNGFU_FAULT_POINTS

namespace kungfu {

// A test sets this hook. The process calls it with the name of each fault point that it reaches.
__attribute__((visibility("default"))) inline void (*fault_hook)(const char* place) = nullptr;

}  // namespace kungfu

#define KUNGFU_FAULT_POINT(place)                                     \
  do {                                                                \
    if (::kungfu::fault_hook != nullptr) ::kungfu::fault_hook(place); \
  } while (false)
#else
#define KUNGFU_FAULT_POINT(place) static_cast<void>(0)
#endif

#endif  // KUNGFU_BASE_FAULT_POINT_H_
