// The timeline of this process, as events of Chrome's trace format (docs/timeline.md).
#ifndef KUNGFU_BASE_TRACE_H_
#define KUNGFU_BASE_TRACE_H_

#include <time.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "kungfu/c_api.h"

namespace kungfu {

// Any thread can add events. One thread writes them to a file ten times per second.
//
// 1. Each thread that adds events has one ring. The thread itself is the ring's only producer, and
// the writer is its only consumer. The producer fills a slot and then stores `pushed` (release).
// The writer loads `pushed` (acquire), reads the slots before it, and then stores `taken`
// (release). The producer loads `taken` (acquire) before it fills a slot again. So no slot is
// written and read at the same time.
// Test: Trace.EventsOfManyThreadsAreWrittenWholeAndInOrder
//
// 2. A producer never waits for space in its ring. If the ring is full, the event is lost, and the
// file contains the number of lost events. `Name` and the writer share a mutex. The writer holds
// this mutex only while it copies names and pointers.
// Test: Trace.FullRingLosesEventsAndCountsThem
//
// 3. A ring is freed when its thread has ended and its events are written. The thread sets
// `retired` (release) after its last event. The writer loads `retired` (acquire) before it takes
// events, so it misses no event of an ended thread.
// Test: Trace.EventsOfEndedThreadsAreWritten
//
// 4. No thread holds a mutex during a system call on the file. So a disk that hangs blocks the
// writer but no other thread, and `Stop` waits for at most kStopLimit.
// Test: Trace.HungFileBlocksNoCaller
//
// 5. After an error, or when the file reaches its size limit, the trace stops permanently and logs
// one line. The file then contains only whole lines. A file without its last line, `]`, is still
// valid in Chrome's format.
// Test: Trace.FullDiskStopsTheTrace
// Test: Trace.SizeLimitEndsTheFileWithWholeLines
//
// 6. A forked child has no writer. It adds no events, and takes no lock of the trace.
// Test: Trace.ForkedChildAddsNothing
class KF_API Trace {  // exported, because the bindings must use the same static data
 public:
  // The kinds of event. The text after the colon explains an event's `values`. The writer adds the
  // category and the names of the values.
  enum class What : uint8_t {
    kOperation,  // a collective, from the call to the result: bytes, n (see NameOperation), version, waiting time (ns)
    kPart,       // the part of a collective that runs within the host: bytes, -, -, waiting time (ns)
    kWait,       // this rank slept or spun until another rank had data: the other rank
    kHostWait,   // this rank slept or spun until other hosts had data
    kCopy,       // a copy of tensors: bytes
    kProgram,    // work of the program or of ms_kungfu's Python, described by the event's name
    kStep,       // a training step: its number
    kInStep,     // a part of a training step
    kMember,     // this process has become a member of a cluster version: version, rank, size
  };
  struct Event {
    uint64_t begin_ns, end_ns;
    uint64_t values[4];
    uint32_t name;
    What what;
  };

  // Returns true if a trace is being written. Costs one load.
  static bool On() { return on_.load(std::memory_order_acquire); }
  // Returns the time of CLOCK_MONOTONIC, which all processes on a host share.
  static uint64_t Now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
  }

  // Starts a trace, unless one is already being written. `fd` is a file that contains the beginning
  // of a JSON array. The trace owns the descriptor. `path` is used in messages. The trace adds at
  // most `max_bytes` to the file.
  static void Start(int fd, const std::string& path, uint64_t max_bytes);
  // Writes the last events and the end record.
  static void Stop() noexcept;

  // Returns the number that stands for a name in events. Locks a mutex.
  static uint32_t Name(const std::string& name) noexcept;
  // Returns the number that stands for the name of a collective. Call it when the collective has
  // ended in cluster version `version`. `n` receives the number of collectives with this name that
  // had already ended in this version. So events with equal version, name and n on all ranks
  // describe the same collective.
  static uint32_t NameOperation(const std::string& name, uint64_t version, uint64_t* n) noexcept;
  static void Add(const Event& event) noexcept;

  // Returns the time in ns that the calling thread has spent waiting for other ranks.
  static uint64_t WaitedByThread() { return waited_ns_; }
  // Records that the calling thread has waited for another rank, or for other hosts. A short wait
  // adds to the total time but gets no event of its own.
  static void AddWait(uint64_t began_ns, uint32_t rank) noexcept;
  static constexpr uint32_t kOtherHosts = UINT32_MAX;
  // Adds an event for program work that began at `began_ns` and ends now.
  static void AddProgram(const std::string& name, uint64_t began_ns) noexcept;

  // Record the parts of a training step that are visible from outside MindSpore. `compute` begins
  // when the training thread's previous program event or collective ends. It ends at the step's
  // first gradient reduction.
  static void StepBegins() noexcept;
  static void StepEnds(uint64_t step) noexcept;
  static void ReductionBegins(uint64_t now_ns) noexcept;
  static void ReductionEnds(uint64_t now_ns) noexcept;
  static void OtherWorkEnds(uint64_t now_ns) noexcept;

 private:
  static inline std::atomic<bool> on_{false};
  static thread_local uint64_t waited_ns_;
  friend class TraceFile;
};

// Adds an event that lasts as long as this object lives.
class TraceSpan {
 public:
  TraceSpan(Trace::What what, const char* name, uint64_t value = 0)
      : what_(what), name_(name), value_(value), began_ns_(Trace::On() ? Trace::Now() : 0) {}
  ~TraceSpan() {
    if (began_ns_ != 0) Trace::Add({began_ns_, Trace::Now(), {value_}, Trace::Name(name_), what_});
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  const Trace::What what_;
  const char* const name_;
  const uint64_t value_;
  const uint64_t began_ns_;
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_TRACE_H_
