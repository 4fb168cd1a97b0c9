// The threads that serve the connections: the mesh's I/O thread, and the *driver*, a thread that waits
// for a small message. A switch between two threads takes most of a small message's time. So the
// driver reads the connections itself.
//
// A thread holds the mutex except while it sleeps and during calls that move bytes.
//
// 1. One reader and one writer. A thread reads a connection only while it has set `reading_`, and
// parses all that it has read before another thread can read. So the frames of a connection are handled
// in their order. (A connection that is held back isn't read. The I/O thread parses the rest of its
// data in ResumeHeld. If connections use TLS, there is no driver.) A thread writes to a connection only
// while it has set the connection's `writing`.
// Test: Mesh.MessagesOfManyThreadsMeetInAnyOrder
//
// 2. No work is missed. A thread that adds work sets `news_` under the mutex. If the driver is awake,
// the driver looks at `news_` before it sleeps, and wakes the I/O thread if there is still work when it
// stops driving. If the driver sleeps or there is none, the thread that adds the work wakes the I/O
// thread. The I/O thread sets `sleeping_` under the mutex, after its last check and before it sleeps.
// Test: Mesh.MessagesOfManyThreadsMeetInAnyOrder
//
// 3. No data stays unread. Both epolls are level-triggered, so they report data until a thread has
// read it. While the connections are lent, their events don't wake the I/O thread. Instead, it
// checks every `lent` (2 ms) whether there is still a driver. If the last driver stopped at least
// `lent` ago, the I/O thread takes the connections back. The connections stay lent for this time
// after a wait, because the next small message often follows immediately. If two checks find a
// driver of the same message, the next check follows after `look` (20 ms), and the driver wakes the
// I/O thread when its message has ended. A thread that waits without driving needs the I/O thread.
// So the waiting thread takes the connections back immediately. If there is a driver, the driver
// does this when it stops.
// Test: Mesh.MessagesMoveWithoutAWaitAfterAWait
// Test: Mesh.WaitingThreadServesTheMessagesOfOthers
//
// 4. The driver sees the end of its message. While the driver sleeps, another thread can end the
// message in EndAll, HaveWritten and Finish. These functions call Stir, which wakes the driver. Only the
// owner of a ticket withdraws its message.
// Test: Mesh.WaitsOfAllThreadsEndWithTheEpochAndTheHost
// Test: Mesh.AWaitEndsWhenAnEarlyMessageOfItsEpochIsHandled
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "transport/tcp/mesh.h"

namespace kungfu::tcp {
namespace {

// A host that ends normally closes its connections one after another. So the mesh waits this long
// for the host's last data on the other connections. If a host is killed, its kernel closes all
// connections together, and the wait is shorter.
constexpr auto kLinger = std::chrono::milliseconds(100);
constexpr int kMostEvents = 64;

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
    HandleEvents(lock, 0, nullptr);
    reading_ = false;
  }
}

// Waits for events of the connections, and handles them until `own` has ended. The epoll reports the
// other events again. Only the thread that has set `reading_` may call this function.
void Mesh::HandleEvents(Lock& lock, int wait_ms, const Transfer* own) {
  epoll_event events[kMostEvents];
  if (wait_ms != 0) lock.unlock();
  const int n = sockets_.Wait(events, wait_ms);
  if (wait_ms != 0) lock.lock();
  if (driver_ == Driver::kSleeps) driver_ = Driver::kAwake;
  for (int e = 0; e < n && (own == nullptr || !own->IsDone()); e++) {
    if (events[e].data.u64 == kWake) {
      stir_.Clear();
      continue;
    }
    Connection& connection = *reinterpret_cast<Connection*>(events[e].data.u64);
    OrLose(lock, hosts_[connection.host], [&] { HaveEvent(lock, connection, events[e].events); });
  }
}

// Waits until the message has ended, for at most one slice.
void Mesh::WaitSlice(Transfer& transfer) {
  Lock lock(mutex_);
  if (!reading_ && lends_ && transfer.total <= kUnaskedBytes) return Drive(lock, transfer);
  if (driver_ == Driver::kNone) TakeBack();
  sleepers_++;
  lock.unlock();
  const uint32_t armed = transfer.done.Arm();
  if (!shm::Counter::Reached(armed, 1)) transfer.done.Sleep(armed, options_.slice);
  lock.lock();
  sleepers_--;
}

// Serves the connections on the calling thread until the message has ended, for at most one slice.
void Mesh::Drive(Lock& lock, const Transfer& transfer) {
  if (!lent_) {
    epoll_.Change(sockets_.fd(), kSockets, 0);
    lent_ = true;
    WakeThread();  // so that the I/O thread takes the connections back later
  }
  struct Role {
    Role(Mesh& of, const Transfer& message) : mesh(of), own(message) {
      mesh.reading_ = true;
      if (std::exchange(mesh.driven_, &own) != &own) mesh.drives_++;
    }
    ~Role() {
      mesh.driver_ = Driver::kNone;
      mesh.reading_ = false;
      mesh.lent_until_ = Clock::now() + mesh.options_.lent;
      if (mesh.news_ || (mesh.looks_late_ && own.IsDone())) mesh.WakeThread();
    }
    Mesh& mesh;
    const Transfer& own;
  };
  {
    const Role role(*this, transfer);
    const auto end = Clock::now() + options_.slice;
    for (auto left = options_.slice; left.count() > 0 && !transfer.IsDone();) {
      driver_ = Driver::kSleeps;
      HandleEvents(lock, news_ ? 0 : static_cast<int>(left.count()), &transfer);
      if (transfer.IsDone()) break;
      if (std::exchange(news_, false) && WriteAll(lock)) news_ = true;
      left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    }
  }
  if (sleepers_ > 0) TakeBack();
}

// Returns the time in ms after which the I/O thread must call this function again, or -1 if the
// connections aren't lent.
int Mesh::LentFor() {
  if (lent_ && !reading_ && Clock::now() >= lent_until_) TakeBack();
  looks_late_ = lent_ && reading_ && std::exchange(drives_seen_, drives_) == drives_;
  if (!lent_) return -1;
  return static_cast<int>((looks_late_ ? options_.look : options_.lent).count());
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
void Mesh::HaveEnd(Lock& lock, Connection& connection, const std::string& why) {
  const Quiet quiet(*this, lock);  // another thread may be writing to the connection
  if (!connection.IsOpen()) return;
  if (connection.in.WithinFrame() || connection.out.source != nullptr) {
    throw Error(KF_PEER_LOST, why + " within a frame");
  }
  Close(connection);
  Host& host = hosts_[connection.host];
  const bool open = std::any_of(host.connections.begin(), host.connections.end(), [](auto& c) { return c->IsOpen(); });
  if (!open) throw Error(KF_PEER_LOST, why);
  BeginEnding(host);
}

void Mesh::BeginEnding(Host& host) {
  if (!host.ending) host.ending = Clock::now();
  WakeThread();  // so that the I/O thread calls LoseEnding
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
