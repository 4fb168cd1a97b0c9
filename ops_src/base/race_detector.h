// Shows ThreadSanitizer in which order two threads use memory, if ThreadSanitizer can't detect this
// order. In other builds, these functions do nothing.
#ifndef KUNGFU_BASE_RACE_DETECTOR_H_
#define KUNGFU_BASE_RACE_DETECTOR_H_

#include <cstddef>

#ifdef __SANITIZE_THREAD__
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void __tsan_read_range(void* at, unsigned long bytes);
}
#endif

namespace kungfu {

// Reports a read of this memory by this thread, at the time of the call.
inline void ReportRead([[maybe_unused]] const void* at, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_THREAD__
  if (bytes > 0) __tsan_read_range(const_cast<void*>(at), bytes);
#endif
}

// While this object lives, ThreadSanitizer ignores the reads of this thread.
class UnreportedReads {
 public:
#ifdef __SANITIZE_THREAD__
  UnreportedReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~UnreportedReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
#else
  UnreportedReads() {}
#endif
  UnreportedReads(const UnreportedReads&) = delete;
  UnreportedReads& operator=(const UnreportedReads&) = delete;
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_RACE_DETECTOR_H_
