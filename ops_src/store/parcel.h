// How a worker asks for a model of another host, and the memory in which it gets the answer.
//
// A worker has no connection to other hosts. It sends an Ask to its host's model transport
// (model_transport.h), with the descriptor of a *parcel*: anonymous memory of the worker's own, a
// page of words and the room for the model.
//
//   worker                                       transport
//     done = 0; an Ask, with the descriptor  ->    maps the parcel
//                                                  the tensors, straight from the network into the room
//                                                  the Answer
//     done == 1? reads the Answer and the room <-  done = 1, wakes
//
// A transport that can't map the parcel (it has no descriptor or memory left for a moment, or the
// descriptor is no parcel) sends a Refusal instead, by the socket of the Ask, and keeps nothing of
// it. So the worker may ask again. It does so up to its deadline, if the Refusal says that the
// reason is momentary.
// Test: ModelsOfOtherHosts.WorkerAsksAgainAfterAMomentaryLackOfItsLauncher
//
// 1. One writer. From the Ask on, the transport alone writes to the parcel, and it writes nothing
// after `done = 1`. The worker touches nothing in between. `done` is advanced with a release and
// read with an acquire. So a worker that sees it sees the answer and, if the answer has a version,
// the whole model: the transport reports a version only when the last byte is there. A parcel whose
// answer isn't awaited any more (a deadline, a signal, the end of the cluster version) is never
// used again, because the transport may still write there.
// Test: ModelsOfOtherHosts.ReadsAreWholeAndNeverGoBack
//
// 2. If the other side fails: a worker's parcel lives until the transport has released it too, and
// no process reads it. A transport that ends answers all requests that it has received. A worker
// finds out about others because its socket has no other end any more. A launcher doesn't end
// without its workers.
// Test: ModelsOfOtherHosts.TheEndOfTheVersionEndsAllRequests
//
// 3. A parcel can't shrink (a seal, which the transport checks), and its memory is allocated before
// it is sent. So a write of the transport can't fail.
// Test: ModelsOfOtherHosts.RequestWithAnUntakenParcelIsRefusedAndTheNextServed
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

// One message of a SOCK_SEQPACKET, and the first of what two transports say to each other.
struct Ask {
  static constexpr uint32_t kMagic = 0x314d464b;  // "KFM1"; its last character is the version of the format
  enum Kind : uint32_t { kDescription = 0, kModel = 1 };

  uint32_t magic = kMagic;
  uint32_t kind = kDescription;
  uint32_t rank = 0;    // the model's owner
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
  // The transport's; the descriptor stays the caller's. Throws ValueError if it is none, or has less room, and
  // InternalError if it can't be mapped.
  static std::unique_ptr<Parcel> Open(int fd, uint64_t padded);
  ~Parcel();
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;

  int fd() const { return fd_; }
  uint64_t room() const { return room_; }
  char* data() const { return map_.data() + kHead; }
  shm::Counter& done() const { return head().done; }
  const Answer& answer() const { return head().answer; }

  // The transport's last word.
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
