// A message that is being sent or received, and the two directions of a connection.
#ifndef KUNGFU_TRANSPORT_TCP_CONNECTION_H_
#define KUNGFU_TRANSPORT_TCP_CONNECTION_H_

#include <sys/uio.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/polling.h"
#include "transport/shm/futex.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tls.h"

namespace kungfu::tcp {

// A message that this host has posted. Until `done` is set, the mesh's mutex guards all fields
// except `done`. After that the fields are constant, and the mesh doesn't refer to the message or
// its memory any more.
struct Transfer {
  Transfer(uint32_t its_host, const Tag& its_tag, const char* from_there, char* to_there, size_t bytes, int eventfd)
      : host(its_host), tag(its_tag), from(from_there), to(to_there), total(bytes), tells(eventfd) {}

  const uint32_t host;
  const Tag tag;
  const char* const from;  // set for a Send
  char* const to;          // set for a Receive
  const size_t total;
  const int tells;   // an eventfd of the caller, written when the message ends; -1 for none
  size_t begun = 0;  // number of bytes in frames that have begun
  size_t moved = 0;  // number of bytes that the kernel has accepted, or that have arrived
  kf_status status = KF_OK;
  std::string error;
  shm::Counter done{};

  bool IsDone() const { return done.Reached(1); }
  void End(kf_status with, const std::string& text) {
    if (IsDone()) return;
    status = with;
    error = text;
    static_cast<void>(done.Advance(1));  // this counter is never fenced
    if (tells >= 0) Event::Set(tells);
  }
};
using TransferPtr = std::shared_ptr<Transfer>;

// The data that is being written: frame headers and at most one payload. The payload belongs to the
// last header, and is in the memory of `source`.
struct Outgoing {
  static constexpr size_t kMostHeads = 16;

  bool Idle() const { return heads.empty() && rest.empty(); }
  size_t Bytes() const { return rest.empty() ? heads.size() * sizeof(FrameHeader) + payload_bytes : rest.size(); }

  // Returns the data that is still to be written, as at most two parts.
  size_t Parts(iovec* parts) {
    char* const first = rest.empty() ? reinterpret_cast<char*>(heads.data()) : rest.data();
    const size_t first_bytes = rest.empty() ? heads.size() * sizeof(FrameHeader) : rest.size();
    size_t n = 0;
    if (written < first_bytes) parts[n++] = {first + written, first_bytes - written};
    if (payload_bytes > 0) {
      const size_t gone = written > first_bytes ? written - first_bytes : 0;
      parts[n++] = {const_cast<char*>(payload) + gone, payload_bytes - gone};  // the payload is never written to
    }
    return n;
  }

  // Copies all remaining data to `rest`, so that the caller gets its memory back. A frame that has
  // begun must be completed with the original bytes, because its header states its length, and the
  // receiver might not know yet that the message is void.
  void Detach() {
    if (!rest.empty() || heads.empty()) return;
    const size_t head_bytes = heads.size() * sizeof(FrameHeader);
    rest.resize(head_bytes + payload_bytes);
    std::memcpy(rest.data(), heads.data(), head_bytes);
    if (payload_bytes > 0) std::memcpy(rest.data() + head_bytes, payload, payload_bytes);
    heads.clear();
    payload = nullptr;
    payload_bytes = 0;
    source = nullptr;
  }
  void Clear() {
    heads.clear();
    source = nullptr;
    payload = nullptr;
    payload_bytes = written = 0;
    std::vector<char>().swap(rest);
  }

  std::vector<FrameHeader> heads;
  TransferPtr source;
  const char* payload = nullptr;
  size_t payload_bytes = 0;
  std::vector<char> rest;  // a copy of all data, used instead of the fields above
  size_t written = 0;      // number of bytes that have been written, out of Bytes()
};

// The data that is being read: first a header, then its payload. A payload is read directly into
// its destination. If the same call reads more bytes, these go to `ahead`. So a frame with a small
// payload needs at most one call, and one call may read many such frames.
struct Incoming {
  static constexpr size_t kAhead = 4 << 10;

  bool WithinFrame() const { return in_payload || begin != end; }
  // Drops the rest of the payload, because its destination is no longer valid.
  void Detach() {
    target = nullptr;
    to = nullptr;
    keeping = false;
    kept.clear();
  }

  char ahead[kAhead];
  size_t begin = 0, end = 0;  // the range of `ahead` that has been read but not parsed yet
  FrameHeader header;         // header of the payload that is being read, or of the frame that is held back
  bool held = false;          // the frame's epoch hasn't begun on this host, so nothing is read until the epoch begins
  bool in_payload = false;
  size_t left = 0;       // number of remaining bytes of the payload
  char* to = nullptr;    // the destination of the payload's next byte; null if the payload is dropped
  TransferPtr target;    // the message that owns the memory at `to`
  bool keeping = false;  // the payload goes into `kept`
  std::vector<char> kept;
};

struct Connection {
  Connection(int descriptor, uint32_t its_host, std::shared_ptr<TlsEnd> its_tls)
      : fd(descriptor), host(its_host), tls(std::move(its_tls)) {}
  ~Connection() { Close(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  void Close() {
    if (fd >= 0) close(std::exchange(fd, -1));
  }
  bool IsOpen() const { return fd >= 0; }
  uint64_t key() const { return reinterpret_cast<uint64_t>(this); }  // its key in an epoll
  SocketResult Write(iovec* parts, size_t num_parts) const {
    return tls == nullptr ? WriteSome(fd, parts, num_parts) : tls->WriteSome(fd, parts, num_parts);
  }
  SocketResult Read(iovec* parts, size_t num_parts) const {
    return tls == nullptr ? ReadSome(fd, parts, num_parts) : tls->ReadSome(fd, parts, num_parts);
  }
  bool Holds() const { return tls != nullptr && tls->Holds(); }
  bool HasMore() const { return tls != nullptr && tls->HasMore(); }

  int fd;
  const uint32_t host;
  const std::shared_ptr<TlsEnd> tls;  // null if the connection doesn't use TLS
  bool writing = false;               // a thread is writing to the connection without holding the mutex
  bool blocked = false;               // the kernel's buffer is full until epoll reports that it isn't
  bool hung_up = false;               // the other side has closed the connection, but earlier frames are held back
  uint32_t events = 0;                // the events that epoll waits for
  uint64_t acknowledged = 0;          // number of acknowledged bytes when the rate was last measured
  Outgoing out;
  Incoming in;
};

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_CONNECTION_H_
