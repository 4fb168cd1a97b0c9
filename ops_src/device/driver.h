// The interfaces that the device layer requires from a vendor: a driver (memory, copies, streams
// and events), an engine (the vendor's library of collectives), and device communicators (the
// vendor's communicators).
#ifndef KUNGFU_DEVICE_DRIVER_H_
#define KUNGFU_DEVICE_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "collectives/communicator.h"
#include "kungfu/device.h"

namespace kungfu::device {

using Stream = void*;
using Event = void*;

// The device on which a thread works, and the vendor's context if the vendor uses contexts.
struct Place {
  int device = -1;
  void* context = nullptr;
};

// A vendor's driver. Thread-safe. All functions throw Error KF_DEVICE, whose message contains the
// vendor's name for the error.
class Driver {
 public:
  virtual ~Driver() = default;

  virtual int Count() = 0;
  virtual Place Here() = 0;  // returns the calling thread's device and context
  virtual void Enter(const Place& place) = 0;
  // Returns an identity. On one host, two ranks have equal identities if and only if they use the
  // same device.
  virtual std::string Identity(int device) = 0;

  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* memory) = 0;
  virtual void* AllocateHost(size_t bytes) = 0;
  virtual void FreeHost(void* memory) = 0;

  virtual Stream NewStream() = 0;
  virtual void Delete(Stream stream) = 0;
  virtual void Synchronize(Stream stream) = 0;
  // Aborts the work that has been enqueued on `stream`. Does nothing if the vendor can't abort it
  // from outside the stream.
  virtual void Abort(Stream stream) noexcept = 0;

  virtual Event NewEvent() = 0;
  virtual void DeleteEvent(Event event) = 0;
  virtual void Record(Event event, Stream stream) = 0;
  virtual void Wait(Stream stream, Event event) = 0;
  virtual bool Done(Event event) = 0;

  virtual void Copy(void* to, const void* from, size_t bytes, kf_copy_kind kind, Stream stream) = 0;
};

// A communicator of the vendor's library that connects the ranks of one cluster version. Not
// thread-safe.
class DeviceCommunicator {
 public:
  // Immediately aborts all running work.
  virtual ~DeviceCommunicator() = default;
  // Returns true when the communicator has started and the launched work is on its stream. The
  // caller must call no other function until this one returns true. Never blocks for long. Throws
  // Error.
  virtual bool Ready() = 0;
  // Begins to enqueue one operation. `Engine::Supports` must be true for this operation. Never
  // blocks for long.
  virtual void Launch(const Operation& operation, Stream stream) = 0;
  // Throws Error if the library has detected a failure.
  virtual void CheckHealth() = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::string Name() const = 0;  // includes the version
  virtual bool Supports(const Operation& operation) const = 0;
  virtual size_t IdBytes() const = 0;
  virtual std::string NewId() = 0;
  // Begins to start a device communicator. All ranks call this function with the same id. Never
  // blocks for long.
  virtual std::unique_ptr<DeviceCommunicator> Begin(const std::string& id, uint32_t rank, uint32_t size) = 0;
};

// Only the code behind these functions uses the vendors' libraries. The functions throw Error
// KF_MISSING if a library is missing.
std::unique_ptr<Driver> OpenCuda(const char* paths);
std::unique_ptr<Engine> OpenNccl(const char* paths);
std::unique_ptr<Driver> OpenAcl(const char* paths);
std::unique_ptr<Engine> OpenHccl(const char* paths, Driver& driver);

// ---- ownership ----

// A recorded event. Each event is recorded only once, because ACL requires a reset before an event
// is recorded again.
class Mark {
 public:
  Mark() = default;
  Mark(Driver& driver, Stream stream) : driver_(&driver), event_(driver.NewEvent()) {
    try {
      driver.Record(event_, stream);
    } catch (...) {
      Drop();
      throw;
    }
  }
  ~Mark() { Drop(); }
  Mark(Mark&& other) noexcept { *this = std::move(other); }
  Mark& operator=(Mark&& other) noexcept {
    std::swap(driver_, other.driver_);
    std::swap(event_, other.event_);
    return *this;
  }

  bool Done() const { return event_ == nullptr || driver_->Done(event_); }
  // Makes all work that is enqueued later on `stream` wait for this event.
  void Precede(Stream stream) const {
    if (event_ != nullptr) driver_->Wait(stream, event_);
  }

 private:
  void Drop() noexcept {
    if (event_ == nullptr) return;
    try {
      driver_->DeleteEvent(event_);
    } catch (...) {  // the device has failed, and the event no longer exists
    }
    event_ = nullptr;
  }
  Driver* driver_ = nullptr;  // outlives all marks
  Event event_ = nullptr;
};

// A memory block that can only grow. It is either in device memory or in pinned host memory.
class Block {
 public:
  Block(Driver& driver, bool host) : driver_(driver), host_(host) {}
  ~Block() { Release(); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  char* Get(size_t bytes) {
    if (bytes > bytes_) {
      Release();
      data_ = static_cast<char*>(host_ ? driver_.AllocateHost(bytes) : driver_.Allocate(bytes));
      bytes_ = bytes;
    }
    return data_;
  }

 private:
  void Release() noexcept {
    if (data_ == nullptr) return;
    try {
      host_ ? driver_.FreeHost(data_) : driver_.Free(data_);
    } catch (...) {  // the device has failed, and its memory no longer exists
    }
    data_ = nullptr;
    bytes_ = 0;
  }
  Driver& driver_;
  const bool host_;
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Rounds a tensor's size up to an alignment at which the vendors' copies are fast.
inline constexpr size_t kDeviceAlign = 256;
inline size_t AlignedForDevice(size_t bytes) { return (bytes + kDeviceAlign - 1) / kDeviceAlign * kDeviceAlign; }

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_DRIVER_H_
