// Reads and writes of a socket. A connection with TLS has TlsEnd's in their place (tls.h).
#ifndef KUNGFU_TRANSPORT_TCP_SOCKET_H_
#define KUNGFU_TRANSPORT_TCP_SOCKET_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace kungfu::tcp {

enum class Moved { kSome, kNothing, kEnd, kError };

// What a call has done: kSome `bytes` of them; kNothing, as it would have had to wait; kEnd, the other side sends no
// more; kError `error` of errno.
struct SocketResult {
  Moved moved;
  size_t bytes;
  int error;
};

// Never wait, and raise no SIGPIPE.
SocketResult WriteSome(int fd, iovec* parts, size_t num_parts);
SocketResult ReadSome(int fd, iovec* parts, size_t num_parts);

// Makes a connected socket one that never waits, holds nothing back and isn't inherited by programs that are started.
void Prepare(int fd);

// What the kernel has measured of what a connection sends: bytes that the other side has acknowledged, and how fast it
// got them lately. `is_least`: there wasn't more to be sent, so that it may carry more. 0 if it is no TCP.
struct Rate {
  uint64_t acknowledged = 0, bytes_per_s = 0;
  bool is_least = true;
};
Rate RateOf(int fd);

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_SOCKET_H_
