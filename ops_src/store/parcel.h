// How a worker asks for a model of another host's, and the memory in which it gets the answer.
//
// A worker has no connection to other hosts. It sends an Ask to its host's model link (model_link.h), with the
// descriptor of a *parcel*: anonymous memory of the worker's own, a page of words and the room for the model.
//
//   worker                                       link
//     done = 0; an Ask, with the descriptor  ->    maps the parcel
//                                                  the tensors, straight from the network into the room
//                                                  the Answer
//     done == 1? reads the Answer and the room <-  done = 1, wakes
//
// A link that couldn't take the parcel (it has no descriptor or memory left for a moment, or what came is none) sends a
// Refusal instead, by the socket that the Ask came by, and keeps nothing of it. So the worker may ask again, which it
// does up to its deadline if the link says that it is for a moment.
//
// Who writes what. All but `done = 0` is the link's from the Ask on, and it writes nothing after `done = 1`; the worker
// touches nothing in between. `done` is advanced with a release and looked at with an acquire, so who sees it sees the
// answer and, where the answer has a version, the whole model: the link says it when the last byte is there, and
// anything else when not all of it is. A parcel whose answer isn't waited for any more (a deadline, a signal, the end
// of the cluster version) is thrown away and never used again: the link may still write there.
//
// If the other side dies here. A worker's parcel lives until the link has let go of it, too, and nobody reads it. A
// link that ends answers all that it has heard; what it hasn't heard is seen by the worker, whose socket has no other
// end then. The launcher that a link is in doesn't die without its workers.
//
// A parcel can't shrink (a seal, which the link looks for), and its memory is there before it is handed over: a write
// of the link's can't fail.
#ifndef KUNGFU_STORE_PARCEL_H_
#define KUNGFU_STORE_PARCEL_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/mapping.h"
#include "store/model_store.h"
#include "transport/shm/futex.h"

namespace kungfu::store {

// One message of a SOCK_SEQPACKET, and the first of what two links say to each other.
struct Ask {
  static constexpr uint32_t kMagic = 0x314d464b;  // "KFM1"; its last character is the version of the format
  enum Kind : uint32_t { kDescription = 0, kModel = 1 };

  uint32_t magic = kMagic;
  uint32_t kind = kDescription;
  uint32_t rank = 0;    // whose
  uint32_t number = 0;  // of the worker's asks; to tell a refusal by
  uint64_t bytes = 0;   // of a model: of its tensors,
  uint64_t padded = 0;  // and in a record (PaddedBytes)
  char name[kNameBytes] = {};
  char layout[kLayoutBytes] = {};
};

// The second. Version 0: there is none, or its worker has ended, or `status` says what is wrong.
struct Answer {
  uint32_t status = KF_OK;
  uint32_t reserved = 0;
  uint64_t version = 0;
  uint64_t bytes = 0;
  char layout[kLayoutBytes] = {};
  char text[512] = {};  // of a failure
};

// Instead of the second, one message of the same socket.
struct Refusal {
  static constexpr uint32_t kMagic = 0x524d464b;  // "KFMR"

  uint32_t magic = kMagic;
  uint32_t number = 0;  // of the ask
  uint32_t again = 0;   // 1: asking again may help
  char text[256] = {};
};

// Sends a message with a descriptor, or without one (-1). As sendmsg answers.
ssize_t SendWith(int socket, const void* data, size_t bytes, int fd);
// Receives one, and the descriptor with it (-1 without). As recvmsg answers.
ssize_t ReceiveWith(int socket, void* data, size_t bytes, int& fd);

// One end's mapping of it.
class Parcel {
 public:
  // The worker's, with room for `padded` bytes.
  static std::unique_ptr<Parcel> Make(uint64_t padded);
  // The link's; the descriptor stays the caller's. Throws ValueError where it is none, or has less room, and
  // InternalError where it can't be mapped.
  static std::unique_ptr<Parcel> Open(int fd, uint64_t padded);
  ~Parcel();
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;

  int fd() const { return fd_; }
  uint64_t room() const { return room_; }
  char* data() const { return map_.data() + kHead; }
  shm::Counter& done() const { return head().done; }
  const Answer& answer() const { return head().answer; }

  // The link's last word.
  void Finish(const Answer& answer);

 private:
  struct Head {
    shm::Counter done;
    alignas(64) Answer answer;
  };
  static constexpr size_t kHead = 4096;
  static_assert(sizeof(Head) <= kHead);

  Parcel(int fd, uint64_t room);
  Head& head() const { return *reinterpret_cast<Head*>(map_.data()); }

  const uint64_t room_;
  Mapping map_;
  int fd_ = -1;  // the worker's
};

}  // namespace kungfu::store

#endif  // KUNGFU_STORE_PARCEL_H_
