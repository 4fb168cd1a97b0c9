// A message on its way, and the two directions of a connection.
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
#include "transport/shm/futex.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tls.h"

namespace kungfu::tcp {

// A message that is posted here. All of it but `done` is guarded by the mesh's mutex until `done` is there; then it is
// constant, and nothing of the mesh points to it or uses its memory.
struct Transfer {
  Transfer(uint32_t its_host, const Tag& its_tag, const char* from_there, char* to_there, size_t bytes, int eventfd)
      : host(its_host), tag(its_tag), from(from_there), to(to_there), total(bytes), tells(eventfd) {}

  const uint32_t host;
  const Tag tag;
  const char* const from;  // of a Send
  char* const to;          // of a Receive
  const size_t total;
  const int tells;   // an eventfd of the caller's that is told of its end; -1: none
  size_t begun = 0;  // bytes in frames that have begun
  size_t moved = 0;  // bytes that the kernel has taken, or that have arrived
  kf_status status = KF_OK;
  std::string error;
  shm::Counter done{};

  bool IsDone() const { return done.Reached(1); }
  void End(kf_status with, const std::string& text) {
    if (IsDone()) return;
    status = with;
    error = text;
    static_cast<void>(done.Advance(1));  // never fenced
    if (tells >= 0) {
      const uint64_t one = 1;
      [[maybe_unused]] const auto written = write(tells, &one, sizeof one);  // full means that it wakes anyway
    }
  }
};
using TransferPtr = std::shared_ptr<Transfer>;

// What is being written: headers, the last of which may have a payload, which lies in the memory of `source`.
struct Outgoing {
  static constexpr size_t kMostHeads = 16;

  bool Idle() const { return heads.empty() && rest.empty(); }
  size_t Bytes() const { return rest.empty() ? heads.size() * sizeof(FrameHeader) + payload_bytes : rest.size(); }

  // What is still to be written, as two parts at most.
  size_t Parts(iovec* parts) {
    char* const first = rest.empty() ? reinterpret_cast<char*>(heads.data()) : rest.data();
    const size_t first_bytes = rest.empty() ? heads.size() * sizeof(FrameHeader) : rest.size();
    size_t n = 0;
    if (written < first_bytes) parts[n++] = {first + written, first_bytes - written};
    if (payload_bytes > 0) {
      const size_t gone = written > first_bytes ? written - first_bytes : 0;
      parts[n++] = {const_cast<char*>(payload) + gone, payload_bytes - gone};  // never written
    }
    return n;
  }

  // A copy of it all, so that the caller gets its memory back. What has begun goes on: a frame can't end before the end
  // that its header says. Other bytes instead would be wrong data for a receiver that doesn't know yet that the message
  // is void.
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
  std::vector<char> rest;  // instead of the above
  size_t written = 0;      // of Bytes()
};

// What is being read: first a header, then its payload. A payload goes straight to where it belongs, what the same call
// brings beyond it goes to `ahead`: frames without much payload take one call each, or one for many.
struct Incoming {
  static constexpr size_t kAhead = 4 << 10;

  bool WithinFrame() const { return in_payload || begin != end; }
  // The payload's destination isn't there any more: the rest is dropped.
  void Detach() {
    target = nullptr;
    to = nullptr;
    keeping = false;
    kept.clear();
  }

  char ahead[kAhead];
  size_t begin = 0, end = 0;  // of `ahead`: read, and not looked at yet
  FrameHeader header;         // of the payload that is being read, or of the frame that is held back
  bool held = false;          // it is of an epoch to come: nothing is read until that is here
  bool in_payload = false;
  size_t left = 0;       // of the payload
  char* to = nullptr;    // where its next byte belongs; null: it is dropped
  TransferPtr target;    // the owner of that memory
  bool keeping = false;  // it belongs into `kept`
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
  const std::shared_ptr<TlsEnd> tls;  // null: it is in the clear
  bool blocked = false;               // the kernel takes no more until epoll says so
  bool hung_up = false;               // the other side has ended it, and what it sent before is held back
  uint32_t events = 0;                // that epoll waits for
  uint64_t acknowledged = 0;          // bytes of the stream, when its rate was last asked for
  Outgoing out;
  Incoming in;
};

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_CONNECTION_H_
