// A device made of host memory and threads: what the stand-ins of the vendors' libraries have in common.
//
// It is stricter than the devices are. A violation is what would be undefined, or wrong now and then, on a real one; it
// is written to standard error and to the file STANDIN_LOG, and the call fails where it can:
//   - device memory that the host reads or writes (its pages are out of reach), that has been freed, or that ends too
//   soon;
//   - memory that is freed while a stream may still use it;
//   - two streams that use the same bytes, one of them writing, without an event or a wait of the host in between,
//   whether
//     or not they meet this time (vector clocks);
//   - a stream or event that is destroyed, of another device, or the default one; an event that was never recorded;
//   - collectives that come in another order, size or type at one rank than at another.
//
// Environment, read when the library is loaded:
//   STANDIN_LOG           file that violations are appended to
//   STANDIN_DEVICES       number of devices, 8 by default
//   STANDIN_MEMORY_BYTES  of a device, without a limit by default
//   STANDIN_DELAY_US      everything on a stream begins up to this much later, at random
//   STANDIN_FAIL          FUNCTION:N:CODE,...: the N-th call of the function (from 1) returns CODE, or ends the process
//   by
//                         signal -CODE; the same as standin_fail()
#ifndef KUNGFU_TESTS_DEVICES_SIMULATED_H_
#define KUNGFU_TESTS_DEVICES_SIMULATED_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace standin {

void Violation(const std::string& what);
// The code that the call is to fail with, 0: none. Called once in every function of the stand-ins.
int Injected(const char* function);

// Vendors count devices among those that a variable makes visible.
int CountDevices(const char* visible_variable);
int PhysicalDevice(const char* visible_variable, int device);
int CurrentDevice();
void SetCurrentDevice(int device);

enum class Status { kOk, kInvalid, kNoMemory };

Status Allocate(void** memory, size_t bytes, bool host);
Status Free(void* memory, bool host);
void Memory(size_t* free, size_t* total);  // of the current device, in bytes

// A handle is a number that is never used again.
Status NewStream(void** stream);
Status DestroyStream(void* stream);
Status Synchronize(void* stream);
Status QueryStream(void* stream, bool* done);
Status AbortStream(void* stream);  // ends what it has begun, drops what is queued
Status NewEvent(void** event);
Status DestroyEvent(void* event);
Status RecordEvent(void* event, void* stream);
Status StreamWait(void* stream, void* event);
Status QueryEvent(void* event, bool* done);
enum class Direction { kToDevice, kToHost, kOnDevice };
Status CopyAsync(void* to, const void* from, size_t bytes, Direction direction, void* stream);

// Whatever else a stream does. It says what it will touch, and gets those ranges as the host may touch them.
struct Range {
  void* memory;
  size_t bytes;
  bool writes;
};
struct Task {
  std::vector<Range> ranges;
  std::function<void(const std::vector<char*>& ranges)> run;
  std::function<void()> interrupt;  // makes a `run` that waits return; may be empty
};
Status Enqueue(void* stream, Task task);

}  // namespace standin

#endif  // KUNGFU_TESTS_DEVICES_SIMULATED_H_
