#include "transport/tcp/socket.h"

#include <fcntl.h>
#include <linux/tcp.h>  // the C library's tcp_info ends before the rate
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

#include "base/error.h"

namespace kungfu::tcp {
namespace {

SocketResult ResultOf(ssize_t bytes) {
  if (bytes > 0) return {Moved::kSome, static_cast<size_t>(bytes), 0};
  if (bytes == 0) return {Moved::kEnd, 0, 0};
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {Moved::kNothing, 0, 0};
  return {Moved::kError, 0, errno};
}

msghdr MessageOf(iovec* parts, size_t num_parts) {
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = num_parts;
  return message;
}

}  // namespace

SocketResult WriteSome(int fd, iovec* parts, size_t num_parts) {
  const msghdr message = MessageOf(parts, num_parts);
  return ResultOf(sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT));
}

SocketResult ReadSome(int fd, iovec* parts, size_t num_parts) {
  msghdr message = MessageOf(parts, num_parts);
  return ResultOf(recvmsg(fd, &message, MSG_DONTWAIT));
}

void Prepare(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
    throw SystemError(Text("fcntl of connection ", fd));
  }
  const int one = 1;
  // Local socket pairs, which some tests use, don't have this option.
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0 && errno != EOPNOTSUPP) {
    throw SystemError(Text("TCP_NODELAY of connection ", fd));
  }
}

Rate RateOf(int fd) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return {};
  return {info.tcpi_bytes_acked, info.tcpi_delivery_rate, info.tcpi_delivery_rate_app_limited != 0};
}

}  // namespace kungfu::tcp
