// Reads from and writes to a socket. A connection with TLS uses the functions of TlsEnd instead
// (tls.h).
#ifndef KUNGFU_TRANSPORT_TCP_SOCKET_H_
#define KUNGFU_TRANSPORT_TCP_SOCKET_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace kungfu::tcp {

enum class Moved { kSome, kNothing, kEnd, kError };

// The result of a read or write. kSome: `bytes` bytes were moved. kNothing: the call would have to
// wait. kEnd: the other side sends no more data. kError: `error` is the errno.
struct SocketResult {
  Moved moved;
  size_t bytes;
  int error;
};

// These functions never wait, and never raise SIGPIPE.
SocketResult WriteSome(int fd, iovec* parts, size_t num_parts);
SocketResult ReadSome(int fd, iovec* parts, size_t num_parts);

// Sets up a connected socket: non-blocking, without delay (TCP_NODELAY), and closed on exec.
void Prepare(int fd);

// The kernel's measurements of a connection: the number of acknowledged bytes, and the recent rate
// at which they were acknowledged. `is_least` means that there was no more data to send, so the
// possible rate may be higher. All values are 0 if the socket isn't a TCP socket.
struct Rate {
  uint64_t acknowledged = 0, bytes_per_s = 0;
  bool is_least = true;
};
Rate RateOf(int fd);

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_SOCKET_H_
