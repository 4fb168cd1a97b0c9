// The timeline of this process, as events of Chrome's trace format (docs/timeline.md).
#ifndef KUNGFU_BASE_TRACE_H_
#define KUNGFU_BASE_TRACE_H_

#include <time.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "kungfu/c_api.h"

namespace kungfu {

// Any thread adds events. One thread writes them to a file, ten times a second.
//
// 1. Each thread that adds events has one ring, with one producer, the thread, and one consumer, the writer. The
// producer fills a slot and then stores `pushed` (release). The writer loads `pushed` (acquire), reads the slots before
// it, and then stores `taken` (release). The producer loads `taken` (acquire) before it fills a slot again. So no slot
// is written and read at the same time.
// Test: Trace.EventsOfManyThreadsAreWrittenWholeAndInOrder
//
// 2. A producer never waits for room: if its ring is full, the event is lost, and the file says how many were. `Name`
// shares a mutex with the writer, which holds it only to copy names and pointers.
// Test: Trace.FullRingLosesEventsAndCountsThem
//
// 3. A ring is freed after its thread has ended and its events are written. The thread sets `retired` (release) after
// its last event. The writer loads `retired` (acquire) before it takes events, so it then takes all of them.
// Test: Trace.EventsOfEndedThreadsAreWritten
//
// 4. No mutex is held during a system call on the file. So a disk that hangs blocks the writer and no other thread, and
// Stop waits for kStopLimit at most.
// Test: Trace.HungFileBlocksNoCaller
//
// 5. After an error, or at the limit of the file's size, the trace stops for good with one log line. The file then has
// whole lines only. A file without its last line, `]`, is still valid in Chrome's format.
// Test: Trace.FullDiskStopsTheTrace
// Test: Trace.SizeLimitEndsTheFileWithWholeLines
//
// 6. A forked child has no writer. It adds no events, and takes no lock of the trace.
// Test: Trace.ForkedChildAddsNothing
class KF_API Trace {  // the bindings must share its data
 public:
  // What an event is. The writer adds the category, and the names of `values`.
  enum class What : uint8_t {
    kOperation,  // a collective, from its call to its result: bytes, n (see NameOperation), version, waiting (ns)
    kPart,       // the part of a collective within the host: bytes, -, -, waiting (ns)
    kWait,       // this rank slept or spun until another rank had data: rank
    kHostWait,   // the same for other hosts
    kCopy,       // bytes
    kProgram,    // the program, or ms_kungfu's Python, did what the name says
    kStep,       // step
    kInStep,     // a part of the step
    kMember,     // this process has become a member: version, rank, size
  };
  struct Event {
    uint64_t begin_ns, end_ns;
    uint64_t values[4];
    uint32_t name;
    What what;
  };

  // Returns whether a trace is written. Costs one load.
  static bool On() { return on_.load(std::memory_order_acquire); }
  // Returns CLOCK_MONOTONIC, which all processes of a host share.
  static uint64_t Now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000 + static_cast<uint64_t>(now.tv_nsec);
  }

  // Starts the trace, unless one is being written. `fd` is a file that has the beginning of a JSON array; the trace
  // owns it. `path` is for messages. The file gets at most `max_bytes` more bytes.
  static void Start(int fd, const std::string& path, uint64_t max_bytes);
  // Writes the last events, and ends the file.
  static void Stop() noexcept;

  // Returns the number of a name. Takes a mutex.
  static uint32_t Name(const std::string& name) noexcept;
  // The same for the name of a collective that has ended in this cluster version. `n` receives how many of this name
  // have ended before. So the events with equal version, name and n at all ranks are one collective.
  static uint32_t NameOperation(const std::string& name, uint64_t version, uint64_t* n) noexcept;
  static void Add(const Event& event) noexcept;

  // The time for which the calling thread has waited for other ranks.
  static uint64_t WaitedByThread() { return waited_ns_; }
  // Adds a wait of the calling thread for another rank, or for other hosts. Short waits get no event of their own.
  static void AddWait(uint64_t began_ns, uint32_t rank) noexcept;
  static constexpr uint32_t kOtherHosts = UINT32_MAX;
  // Adds an event of the program, from `began_ns` until now.
  static void AddProgram(const std::string& name, uint64_t began_ns) noexcept;

  // The parts of a training step that can be told from outside of MindSpore. `compute` lasts from the end of the last
  // event of the program, or of another collective, in the thread that trains to the first reduction of gradients.
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

// Adds an event for the lifetime of this object.
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
