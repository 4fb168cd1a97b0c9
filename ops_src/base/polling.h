// An eventfd and an epoll, which close themselves.
#ifndef KUNGFU_BASE_POLLING_H_
#define KUNGFU_BASE_POLLING_H_

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "base/error.h"

namespace kungfu {

// A descriptor that one thread makes readable to wake another thread. Thread-safe.
class Event {
 public:
  Event() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0) throw SystemError("eventfd");
  }
  ~Event() { close(fd_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  int fd() const { return fd_; }
  void Set() const { Set(fd_); }
  static void Set(int fd) {
    const uint64_t one = 1;
    // If the write fails, the eventfd is full, and therefore readable.
    [[maybe_unused]] const auto written = write(fd, &one, sizeof one);
  }
  void Clear() const {
    uint64_t count;
    [[maybe_unused]] const auto bytes = read(fd_, &count, sizeof count);
  }

 private:
  const int fd_;
};

// Thread-safe. An epoll may watch another epoll.
class Epoll {
 public:
  Epoll() : fd_(epoll_create1(EPOLL_CLOEXEC)) {
    if (fd_ < 0) throw SystemError("epoll_create1");
  }
  ~Epoll() { close(fd_); }
  Epoll(const Epoll&) = delete;
  Epoll& operator=(const Epoll&) = delete;

  int fd() const { return fd_; }
  // `key` is returned with the events of the descriptor, as epoll_event::data.u64.
  void Add(int fd, uint64_t key, uint32_t events = EPOLLIN) const { Control(EPOLL_CTL_ADD, fd, key, events); }
  void Change(int fd, uint64_t key, uint32_t events) const { Control(EPOLL_CTL_MOD, fd, key, events); }
  void Remove(int fd) const { epoll_ctl(fd_, EPOLL_CTL_DEL, fd, nullptr); }
  // Returns the number of events, or 0 if the time has passed or a signal has arrived. A negative
  // time means no limit.
  template <int kMost>
  int Wait(epoll_event (&events)[kMost], int milliseconds) const {
    const int n = epoll_wait(fd_, events, kMost, milliseconds);
    return n < 0 ? 0 : n;
  }

 private:
  void Control(int what, int fd, uint64_t key, uint32_t events) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = key;
    if (epoll_ctl(fd_, what, fd, &event) != 0) throw SystemError("epoll_ctl");
  }

  const int fd_;
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_POLLING_H_
