// The mesh's I/O thread, which uses one epoll for all connections.
//
// The thread holds the mutex except while it sleeps and during calls that move bytes. It misses no
// work: another thread that adds work sets `news_` under the mutex, and writes to the eventfd if
// `sleeping_` is set. The I/O thread sets `sleeping_` under the mutex, after its last check and
// before it sleeps. Epoll is level-triggered, so it reports data again until the thread has read
// the data.
#include <sys/epoll.h>

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

}  // namespace

// Runs `body`. If `body` throws, declares the host lost.
template <typename Body>
void Mesh::OrLose(Host& host, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {  // includes the error that there is no memory
    Lose(host, error.what());
  }
}

void Mesh::Serve() {
  Lock lock(mutex_);
  while (!stop_) {
    news_ = false;
    if (renewed_) ResumeHeld();
    const bool writes_on = WriteAll(lock), reads_on = ReadMore(lock);
    const bool more = writes_on || reads_on || news_;
    const int linger_ms = LoseEnding();
    sleeping_ = !more;
    epoll_event events[kMostEvents];
    lock.unlock();
    const int n = epoll_wait(epoll_, events, kMostEvents, more ? 0 : linger_ms);
    lock.lock();
    sleeping_ = false;
    for (int e = 0; e < n; e++) {
      if (events[e].data.ptr == nullptr) {
        uint64_t count;
        [[maybe_unused]] const auto bytes = read(wake_, &count, sizeof count);
        continue;
      }
      Connection& connection = *static_cast<Connection*>(events[e].data.ptr);
      OrLose(hosts_[connection.host], [&] { HaveEvent(lock, connection, events[e].events); });
    }
  }
}

// Returns true if more data can be written immediately.
bool Mesh::WriteAll(Lock& lock) {
  bool more = false;
  for (Host& host : hosts_) {
    OrLose(host, [&] {
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
    OrLose(host, [&] {
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
    Listen(connection);  // WriteAll tries again and detects a failure
  }
  if (!connection.in.held) {
    if (failed || (events & (EPOLLIN | EPOLLRDHUP)) != 0) Read(lock, connection);
  } else if (failed) {
    throw Error(KF_PEER_LOST, "a connection to it has failed");
  } else if ((events & EPOLLRDHUP) != 0) {
    connection.hung_up = true;
    if (!hosts_[connection.host].ending) hosts_[connection.host].ending = Clock::now();
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
  if (!host.ending) host.ending = Clock::now();
}

// Registers with epoll the events that this connection needs.
void Mesh::Listen(Connection& connection) {
  epoll_event event{};
  if (!connection.in.held) event.events |= EPOLLIN;
  if (!connection.hung_up) event.events |= EPOLLRDHUP;
  if (connection.blocked) event.events |= EPOLLOUT;
  if (event.events == connection.events) return;
  event.data.ptr = &connection;
  if (epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.fd, &event) != 0) throw SystemError("epoll_ctl");
  connection.events = event.events;
}

void Mesh::ResumeHeld() {
  renewed_ = false;
  for (Host& host : hosts_) {
    OrLose(host, [&] {
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
int Mesh::LoseEnding() {
  int next_ms = -1;
  for (Host& host : hosts_) {
    if (!host.ending) continue;
    const auto left = *host.ending + kLinger - Clock::now();
    if (left <= Clock::duration::zero()) {
      Lose(host, "it closed a connection");
      continue;
    }
    const int left_ms = static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
    next_ms = next_ms < 0 ? left_ms : std::min(next_ms, left_ms);
  }
  return next_ms;
}

}  // namespace kungfu::tcp
