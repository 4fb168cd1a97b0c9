// Places at which tests can make a process exit, stop or wait. They cost nothing unless the tests are built.
#ifndef KUNGFU_BASE_FAULT_POINT_H_
#define KUNGFU_BASE_FAULT_POINT_H_

#ifdef KUNGFU_FAULT_POINTS

namespace kungfu {

// Called with the name of each fault point that the process reaches. Set by a test.
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
