// The threads that serve the connections: the mesh's I/O thread, and the *driver*, a thread that waits
// for a small message. A switch between two threads takes most of a small message's time. So the
// driver reads the connections itself.
//
// A thread holds the mutex except while it sleeps and during calls that move bytes.
//
// 1. One reader. Only the thread that has set `reading_` reads the connections, and it parses all
// that it reads. So it handles the frames of a connection in their order. `writing` ensures the same
// for the writers of a connection.
// Test: Mesh.MessagesOfManyThreadsMeetInAnyOrder
//
// 2. No work is missed. A thread that adds work sets `news_` under the mutex. If the driver is awake,
// it looks at `news_` before it sleeps or stops driving. Otherwise the I/O thread is awake, or is
// woken: it sets `sleeping_` under the mutex, after its last check and before it sleeps. If the driver
// stops while there is work, it wakes the I/O thread.
// Test: Mesh.MessagesOfManyThreadsMeetInAnyOrder
//
// 3. No data stays unread. Both epolls are level-triggered, so they report data until a thread has
// read it. While the connections are lent, their events don't wake the I/O thread. The I/O thread
// then looks every kLent whether there is still a driver. If the last one has stopped at least kLent
// ago, it takes the connections back. It is lent time and not just one wait, because a take-back needs
// system calls, and the next small message often follows immediately. A thread that waits without
// driving needs the I/O thread. So it takes the connections back at once, or the driver does it for
// this thread.
// Test: Mesh.MessagesMoveWithoutAWaitAfterAWait
// Test: Mesh.WaitingThreadServesTheMessagesOfOthers
//
// 4. The driver sees the end of its message. The driver itself reads. All other ways in which a
// message can end call Stir, which wakes a sleeping driver: EndAll and HaveWritten. Only the owner of
// a ticket withdraws its message.
// Test: Mesh.WaitsOfAllThreadsEndWithTheEpochAndTheHost
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/run_time.h"
#include "transport/tcp/mesh.h"

namespace kungfu::tcp {
namespace {

// A host that ends normally closes its connections one after another. So the mesh waits this long
// for the host's last data on the other connections. If a host is killed, its kernel closes all
// connections together, and the wait is shorter.
constexpr auto kLinger = std::chrono::milliseconds(100);
constexpr int kMostEvents = 64;
// The interval at which a waiting thread checks whether its wait can still succeed.
constexpr auto kSlice = std::chrono::milliseconds(20);
static_assert(kSlice <= RunTime::kLongestSlice);
// The time for which the I/O thread reads nothing after a thread has stopped driving.
constexpr auto kLent = std::chrono::milliseconds(2);

// Returns the earlier of two times in ms. A negative time is never.
int Sooner(int a, int b) { return a < 0 || b < 0 ? std::max(a, b) : std::min(a, b); }

}  // namespace

void Mesh::Serve() {
  Lock lock(mutex_);
  while (!stop_) {
    news_ = false;
    if (renewed_) ResumeHeld(lock);
    const bool writes_on = WriteAll(lock), reads_on = ReadMore(lock);
    const int linger_ms = LoseEnding(lock);
    const int lent_ms = LentFor();
    const bool more = writes_on || reads_on || news_ || renewed_ || stop_;
    sleeping_ = !more;
    epoll_event events[2];
    lock.unlock();
    const int n = epoll_.Wait(events, more ? 0 : Sooner(linger_ms, lent_ms));
    lock.lock();
    sleeping_ = false;
    for (int e = 0; e < n; e++) {
      if (events[e].data.u64 == kWake) wake_.Clear();
    }
    if (n == 0 || reading_) continue;
    reading_ = true;
    HandleEvents(lock, 0);
    reading_ = false;
  }
}

// Waits for events of the connections, and handles them. Returns false if there are none. Only the
// thread that has set `reading_` may call this function.
bool Mesh::HandleEvents(Lock& lock, int wait_ms) {
  epoll_event events[kMostEvents];
  if (wait_ms != 0) lock.unlock();
  const int n = sockets_.Wait(events, wait_ms);
  if (wait_ms != 0) lock.lock();
  if (driver_ == Driver::kSleeps) driver_ = Driver::kAwake;
  for (int e = 0; e < n; e++) {
    if (events[e].data.u64 == kWake) {
      stir_.Clear();
      continue;
    }
    Connection& connection = *reinterpret_cast<Connection*>(events[e].data.u64);
    OrLose(lock, hosts_[connection.host], [&] { HaveEvent(lock, connection, events[e].events); });
  }
  return n > 0;
}

// Waits until the message has ended, for at most one slice.
void Mesh::WaitSlice(Transfer& transfer) {
  Lock lock(mutex_);
  if (!reading_ && lends_ && transfer.total <= kUnaskedBytes) return Drive(lock, transfer);
  sleepers_++;
  if (!reading_) TakeBack();
  lock.unlock();
  const uint32_t armed = transfer.done.Arm();
  if (!shm::Counter::Reached(armed, 1)) transfer.done.Sleep(armed, kSlice);
  lock.lock();
  sleepers_--;
}

// Serves the connections on the calling thread until the message has ended, for at most one slice.
void Mesh::Drive(Lock& lock, const Transfer& transfer) {
  if (!lent_) {
    epoll_.Change(sockets_.fd(), kSockets, 0);
    lent_ = true;
    WakeThread();  // so that it takes the connections back after kLent
  }
  reading_ = true;
  bool waits = true;
  while (waits && !transfer.IsDone()) {
    driver_ = Driver::kSleeps;
    waits = HandleEvents(lock, news_ ? 0 : static_cast<int>(kSlice.count())) || news_;
    if (std::exchange(news_, false) && WriteAll(lock)) news_ = true;
  }
  driver_ = Driver::kNone;
  reading_ = false;
  lent_until_ = Clock::now() + kLent;
  if (news_) WakeThread();
  if (sleepers_ > 0) TakeBack();
}

// Returns the time in ms after which the I/O thread must call this function again, or -1 if the
// connections aren't lent.
int Mesh::LentFor() {
  if (lent_ && !reading_ && Clock::now() >= lent_until_) TakeBack();
  return lent_ ? static_cast<int>(kLent.count()) : -1;
}

// Lets the connections' events wake the I/O thread again.
void Mesh::TakeBack() {
  if (std::exchange(lent_, false)) epoll_.Change(sockets_.fd(), kSockets, EPOLLIN);
}

// Returns true if more data can be written immediately.
bool Mesh::WriteAll(Lock& lock) {
  bool more = false;
  for (Host& host : hosts_) {
    OrLose(lock, host, [&] {
      for (auto& connection : host.connections) more = Write(lock, *connection) || more;
    });
  }
  return more;
}

// Reads data that TLS has already received from the socket, and that epoll therefore can't report.
// Returns true if more data can be read immediately.
bool Mesh::ReadMore(Lock& lock) {
  bool more = false;
  for (Host& host : hosts_) {
    OrLose(lock, host, [&] {
      for (auto& connection : host.connections) {
        const auto is_there = [&] { return connection->IsOpen() && !connection->in.held && connection->HasMore(); };
        if (is_there()) Read(lock, *connection);
        more = more || is_there();
      }
    });
  }
  return more;
}

// Handles an event of a connection. Ignores it if an earlier event has closed the connection.
void Mesh::HaveEvent(Lock& lock, Connection& connection, uint32_t events) {
  if (!connection.IsOpen()) return;
  const bool failed = (events & (EPOLLERR | EPOLLHUP)) != 0;
  if (connection.blocked && (failed || (events & EPOLLOUT) != 0)) {
    connection.blocked = false;
    Listen(connection);
    Wake();  // WriteAll tries again and detects a failure
  }
  if (!connection.in.held) {
    if (failed || (events & (EPOLLIN | EPOLLRDHUP)) != 0) Read(lock, connection);
  } else if (failed) {
    throw Error(KF_PEER_LOST, "a connection to it has failed");
  } else if ((events & EPOLLRDHUP) != 0) {
    connection.hung_up = true;
    BeginEnding(hosts_[connection.host]);
    Listen(connection);
  }
}

// Handles a connection that has ended. Nothing more is received or sent on it.
void Mesh::HaveEnd(Connection& connection, const std::string& why) {
  if (connection.in.WithinFrame() || connection.out.source != nullptr) {
    throw Error(KF_PEER_LOST, why + " within a frame");
  }
  connection.Close();
  Host& host = hosts_[connection.host];
  const bool open = std::any_of(host.connections.begin(), host.connections.end(), [](auto& c) { return c->IsOpen(); });
  if (!open) throw Error(KF_PEER_LOST, why);
  BeginEnding(host);
}

void Mesh::BeginEnding(Host& host) {
  if (!host.ending) host.ending = Clock::now();
  WakeThread();  // so that it calls LoseEnding
}

// Registers with epoll the events that this connection needs.
void Mesh::Listen(Connection& connection) {
  uint32_t events = 0;
  if (!connection.in.held) events |= EPOLLIN;
  if (!connection.hung_up) events |= EPOLLRDHUP;
  if (connection.blocked) events |= EPOLLOUT;
  if (events == connection.events) return;
  sockets_.Change(connection.fd, connection.key(), events);
  connection.events = events;
}

void Mesh::ResumeHeld(Lock& lock) {
  renewed_ = false;
  for (Host& host : hosts_) {
    OrLose(lock, host, [&] {
      for (auto& connection : host.connections) {
        if (!connection->IsOpen() || !connection->in.held) continue;
        connection->in.held = false;
        connection->hung_up = false;  // if the other side has closed the connection, epoll reports this again
        Begin(*connection);
        Parse(*connection);
        Listen(*connection);
      }
    });
  }
}

// Returns the time in ms until the first closing host is declared lost, or -1 if no host is
// closing.
int Mesh::LoseEnding(Lock& lock) {
  int next_ms = -1;
  for (Host& host : hosts_) {
    if (!host.ending) continue;
    const auto left = *host.ending + kLinger - Clock::now();
    if (left <= Clock::duration::zero()) {
      const Quiet quiet(*this, lock);
      Lose(host, "it closed a connection");
      news_ = true;  // the mutex may have been released, so look at all hosts again
      continue;
    }
    const int left_ms = static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
    next_ms = next_ms < 0 ? left_ms : std::min(next_ms, left_ms);
  }
  return next_ms;
}

}  // namespace kungfu::tcp
