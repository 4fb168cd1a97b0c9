// How a worker requests a model of another host, and the memory in which it receives the answer.
//
// A worker has no connection to other hosts. It sends an Ask to its host's model transport
// (model_transport.h), with the descriptor of a *parcel*. A parcel is anonymous memory of the
// worker, with a page of control words and room for the model.
//
//   worker                                       transport
//     done = 0; an Ask, with the descriptor  ->    maps the parcel
//                                                  the tensors, from the network into the room
//                                                  the Answer
//     done == 1? reads the Answer and the room <-  done = 1, wakes
//
// If the transport can't map the parcel, it sends a Refusal on the socket of the Ask, and forgets
// the Ask. Possible reasons are a temporary lack of descriptors or memory, or a descriptor that
// isn't a parcel. If the Refusal says that the reason is temporary, the worker asks again, until
// its deadline.
// Test: ModelsOfOtherHosts.WorkerAsksAgainAfterAMomentaryLackOfItsLauncher
//
// 1. One writer. After the Ask, only the transport writes to the parcel, and it writes nothing
// after `done = 1`. The worker doesn't use the parcel in between. `done` is advanced with a release
// and read with an acquire. So a worker that reads `done == 1` sees the answer and, if the answer
// has a version, the whole model: the transport reports a version only when the last byte has
// arrived. If the worker stops waiting (a deadline, a signal, the end of the cluster version), it
// never uses the parcel again, because the transport may still write to it.
// Test: ModelsOfOtherHosts.ReadsAreWholeAndNeverGoBack
//
// 2. Failures of the other side. If the worker fails, its parcel lives until the transport has
// released it, and no process reads it. If the transport ends, it answers all requests that it has
// received. If it didn't receive a request, the worker finds that its socket has no other end any
// more. A launcher doesn't end before its workers.
// Test: ModelsOfOtherHosts.TheEndOfTheVersionEndsAllRequests
//
// 3. A write of the transport can't fail: a parcel can't shrink (the transport checks its seal),
// and its memory is allocated before it is sent.
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

// A request: one message of a SOCK_SEQPACKET socket, and the first message between two transports.
struct Ask {
  static constexpr uint32_t kMagic = 0x314d464b;  // "KFM1"; its last character is the version of the format
  enum Kind : uint32_t { kDescription = 0, kModel = 1 };

  uint32_t magic = kMagic;
  uint32_t kind = kDescription;
  uint32_t rank = 0;    // the model's owner
  uint32_t number = 0;  // number of this request at the worker; a refusal repeats it
  uint64_t bytes = 0;   // size of the model's tensors
  uint64_t padded = 0;  // size of the tensors in a record (PaddedBytes)
  char name[kNameBytes] = {};
  char layout[kLayoutBytes] = {};
};

// The answer: the second message between two transports. If the version is 0, there is no model, or its worker has
// ended, or `status` tells the failure.
struct Answer {
  uint32_t status = KF_OK;
  uint32_t reserved = 0;
  uint64_t version = 0;
  uint64_t bytes = 0;
  char layout[kLayoutBytes] = {};
  char text[512] = {};  // the message of a failure
};

// A rejected request: a message on the socket of the request, instead of an answer.
struct Refusal {
  static constexpr uint32_t kMagic = 0x524d464b;  // "KFMR"

  uint32_t magic = kMagic;
  uint32_t number = 0;  // number of the rejected request
  uint32_t again = 0;   // 1: the reason is temporary, so the worker may ask again
  char text[256] = {};
};

// Sends a message, with a descriptor unless `fd` is -1. Returns the result of sendmsg.
ssize_t SendWith(int socket, const void* data, size_t bytes, int fd);
// Receives a message. Sets `fd` to the descriptor that came with it, or to -1. Returns the result of recvmsg.
ssize_t ReceiveWith(int socket, void* data, size_t bytes, int& fd);

// The worker's or the transport's mapping of a parcel.
class Parcel {
 public:
  // Makes the worker's parcel, with room for `padded` bytes.
  static std::unique_ptr<Parcel> Make(uint64_t padded);
  // Maps the parcel in the transport. The caller keeps the descriptor. Throws ValueError if it isn't a parcel or has
  // less room, and InternalError if it can't be mapped.
  static std::unique_ptr<Parcel> Open(int fd, uint64_t padded);
  ~Parcel();
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;

  int fd() const { return fd_; }
  uint64_t room() const { return room_; }
  char* data() const { return map_.data() + kHead; }
  shm::Counter& done() const { return head().done; }
  const Answer& answer() const { return head().answer; }

  // Publishes the answer. The transport doesn't write to the parcel afterwards.
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
  int fd_ = -1;  // the worker's descriptor
};

}  // namespace kungfu::store

#endif  // KUNGFU_STORE_PARCEL_H_
