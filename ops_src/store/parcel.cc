#include "store/parcel.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstring>

#include "base/error.h"

namespace kungfu::store {
namespace {

constexpr uint64_t kMostRoom = uint64_t{1} << 46;  // more than any machine has, and far from an overflow

}  // namespace

ssize_t SendWith(int socket, const void* data, size_t bytes, int fd) {
  iovec part{const_cast<void*>(data), bytes};  // nothing writes to this memory
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    cmsghdr* const control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(control), &fd, sizeof fd);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL);
}

ssize_t ReceiveWith(int socket, void* data, size_t bytes, int& fd) {
  fd = -1;
  iovec part{data, bytes};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof fd)];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = CMSG_LEN(sizeof fd);  // excludes the padding, in which a second descriptor would fit
  const ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (n <= 0) return n;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
  }
  return n;
}

Parcel::Parcel(int fd, uint64_t room)
    : room_(room), map_(fd, 0, kHead + room, /*writable=*/true, Text("a parcel of ", room, " bytes")) {}

Parcel::~Parcel() {
  if (fd_ >= 0) close(fd_);
}

std::unique_ptr<Parcel> Parcel::Make(uint64_t padded) {
  const int fd = memfd_create("kungfu-parcel", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw SystemError("memfd_create");
  try {
    const int error = posix_fallocate(fd, 0, static_cast<off_t>(kHead + padded));
    if (error != 0) {
      throw Error(KF_INTERNAL,
                  Text("can't allocate ", padded, " bytes for a model from another host: ", std::strerror(error)));
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0) throw SystemError("F_ADD_SEALS");
    std::unique_ptr<Parcel> parcel(new Parcel(fd, padded));
    parcel->fd_ = fd;
    return parcel;
  } catch (...) {
    close(fd);
    throw;
  }
}

std::unique_ptr<Parcel> Parcel::Open(int fd, uint64_t padded) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || padded > kMostRoom || FileSize(fd, "a parcel") < kHead + padded) {
    throw Error(KF_INVALID,
                Text("the memory sent with a request for a model can shrink, or is too small for ", padded, " bytes"));
  }
  return std::unique_ptr<Parcel>(new Parcel(fd, padded));
}

void Parcel::Finish(const Answer& answer) {
  head().answer = answer;
  static_cast<void>(head().done.Advance(1));  // this counter is never fenced
}

}  // namespace kungfu::store
