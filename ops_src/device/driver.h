// What the device layer needs of a vendor: a driver (memory, copies, streams, events), an engine (its library of
// collectives), and device communicators (that library's own).
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

// Where a thread works: the device, and the vendor's context if there is such a thing.
struct Place {
  int device = -1;
  void* context = nullptr;
};

// Thread-safe. Everything throws Error KF_DEVICE with the vendor's name of what went wrong.
class Driver {
 public:
  virtual ~Driver() = default;

  virtual int Count() = 0;
  virtual Place Here() = 0;  // of the calling thread
  virtual void Enter(const Place& place) = 0;
  // Equal for two ranks of one host if and only if they use the same device.
  virtual std::string Identity(int device) = 0;

  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* memory) = 0;
  virtual void* AllocateHost(size_t bytes) = 0;
  virtual void FreeHost(void* memory) = 0;

  virtual Stream NewStream() = 0;
  virtual void Delete(Stream stream) = 0;
  virtual void Synchronize(Stream stream) = 0;
  // Ends what `stream` has begun, if the vendor can do so from outside; else nothing.
  virtual void Abort(Stream stream) noexcept = 0;

  virtual Event NewEvent() = 0;
  virtual void DeleteEvent(Event event) = 0;
  virtual void Record(Event event, Stream stream) = 0;
  virtual void Wait(Stream stream, Event event) = 0;
  virtual bool Done(Event event) = 0;

  virtual void Copy(void* to, const void* from, size_t bytes, kf_copy_kind kind, Stream stream) = 0;
};

// A communicator of the vendor's library over the ranks of one cluster version. One thread at a time.
class DeviceCommunicator {
 public:
  // Gives everything up, at once: whatever is under way ends without a result.
  virtual ~DeviceCommunicator() = default;
  // Whether it has been brought up and what was launched is on its stream; nothing else may be asked of it before.
  // Called again and again, never blocks for long. Throws Error.
  virtual bool Ready() = 0;
  // Begins to enqueue one operation; one that Engine::Supports says no to is never brought here. Never blocks for long.
  virtual void Launch(const Operation& operation, Stream stream) = 0;
  // Throws Error if the library has noticed a failure by itself.
  virtual void CheckHealth() = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::string Name() const = 0;  // with its version
  virtual bool Supports(const Operation& operation) const = 0;
  virtual size_t IdBytes() const = 0;
  virtual std::string NewId() = 0;
  // Begins to bring up a device communicator; the other ranks do the same with the same id. Never blocks for long.
  virtual std::unique_ptr<DeviceCommunicator> Begin(const std::string& id, uint32_t rank, uint32_t size) = 0;
};

// The only functions that know of the vendors' libraries. Throw Error KF_MISSING.
std::unique_ptr<Driver> OpenCuda(const char* paths);
std::unique_ptr<Engine> OpenNccl(const char* paths);
std::unique_ptr<Driver> OpenAcl(const char* paths);
std::unique_ptr<Engine> OpenHccl(const char* paths, Driver& driver);

// ---- ownership ----

// An event that has been recorded once. Events aren't recorded again: with ACL that takes a reset in between.
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
  // Makes what is enqueued on `stream` from now on wait for it.
  void Precede(Stream stream) const {
    if (event_ != nullptr) driver_->Wait(stream, event_);
  }

 private:
  void Drop() noexcept {
    if (event_ == nullptr) return;
    try {
      driver_->DeleteEvent(event_);
    } catch (...) {  // the device is gone, and the event with it
    }
    event_ = nullptr;
  }
  Driver* driver_ = nullptr;  // outlives every mark
  Event event_ = nullptr;
};

// Memory that only grows, of the device or pinned.
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
    } catch (...) {  // the device is gone, and its memory with it
    }
    data_ = nullptr;
    bytes_ = 0;
  }
  Driver& driver_;
  const bool host_;
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Adds the bytes of an operation's tensor up to something that vendors like to copy.
inline constexpr size_t kDeviceAlign = 256;
inline size_t AlignedForDevice(size_t bytes) { return (bytes + kDeviceAlign - 1) / kDeviceAlign * kDeviceAlign; }

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_DRIVER_H_
