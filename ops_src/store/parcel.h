// How a worker requests a model from another host, and the memory in which it receives the answer.
//
// A worker has no connection to other hosts. It sends an `Ask` to its host's model transport
// (model_transport.h), together with the descriptor of a *parcel*. A parcel is anonymous memory of
// the worker. It consists of a page of control words, and space for the model (the room).
//
//   worker                                       transport
//     done = 0; an Ask, with the descriptor  ->    maps the parcel
//                                                  the tensors, from the network into the room
//                                                  the Answer
//     done == 1? reads the Answer and the room <-  done = 1; wakes the worker
//
// If the transport can't map the parcel, it sends a `Refusal` on the socket of the `Ask`, and drops
// the `Ask`. Possible reasons are a temporary lack of descriptors or memory, or a descriptor that
// isn't a parcel. If the reason is temporary, the worker repeats the request until its deadline.
// Test: ModelsOfOtherHosts.WorkerAsksAgainAfterAMomentaryLackOfItsLauncher
//
// 1. One writer. After the `Ask`, only the transport writes to the parcel, and it writes nothing
// after `done = 1`. Between the two, the worker doesn't use the parcel. The transport advances
// `done` with release order, and the worker reads it with acquire order. So a worker that reads `done ==
// 1` sees the answer. If the answer has a version, the worker also sees the whole model, because
// the transport reports a version only when the last byte has arrived. If the worker stops waiting
// (because of a deadline, a signal, or the end of the cluster version), it never uses the parcel
// again, because the transport may still write to it.
// Test: ModelsOfOtherHosts.ReadsAreWholeAndNeverGoBack
//
// 2. Failures of the other side. If the worker fails, its parcel exists until the transport has
// released it, and no process reads it. If the transport ends, it answers all requests that it has
// received. If the transport hasn't received a worker's request, the worker detects that the other
// end of its socket is closed.
// Test: ModelsOfOtherHosts.TheEndOfTheVersionEndsAllRequests
//
// 3. The transport's writes can't fail, because a parcel can't shrink (the transport checks its
// seal), and because the worker allocates the parcel's memory before it sends the parcel.
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

// A request. It is one message on a SOCK_SEQPACKET socket, and also the first message between two
// transports.
struct Ask {
  static constexpr uint32_t kMagic = 0x314d464b;  // "KFM1": the last character is the version of the format
  enum Kind : uint32_t { kDescription = 0, kModel = 1 };

  uint32_t magic = kMagic;
  uint32_t kind = kDescription;
  uint32_t rank = 0;    // the rank that owns the model
  uint32_t number = 0;  // the worker's number for this request; a refusal repeats it
  uint64_t bytes = 0;   // number of bytes in the model's tensors
  uint64_t padded = 0;  // number of bytes that the tensors use in a record (PaddedBytes)
  char name[kNameBytes] = {};
  char layout[kLayoutBytes] = {};
};

// The answer, which is the second message between two transports. If the version is 0, there are
// three possible reasons: there is no model, its worker has ended, or `status` describes a failure.
struct Answer {
  uint32_t status = KF_OK;
  uint32_t reserved = 0;
  uint64_t version = 0;
  uint64_t bytes = 0;
  char layout[kLayoutBytes] = {};
  char text[512] = {};  // the message if there is a failure
};

// The rejection of a request. It is a message on the request's socket, and is sent instead of an
// answer.
struct Refusal {
  static constexpr uint32_t kMagic = 0x524d464b;  // "KFMR"

  uint32_t magic = kMagic;
  uint32_t number = 0;  // the number of the rejected request
  uint32_t again = 0;   // 1 if the reason is temporary, so that the worker may ask again
  char text[256] = {};
};

// Sends a message. If `fd` isn't -1, sends this descriptor with it. Returns the result of sendmsg.
ssize_t SendWith(int socket, const void* data, size_t bytes, int fd);
// Receives a message. Sets `fd` to the descriptor that came with the message, or to -1. Returns the
// result of recvmsg.
ssize_t ReceiveWith(int socket, void* data, size_t bytes, int& fd);

// A mapping of a parcel, in the worker or in the transport.
class Parcel {
 public:
  // Creates the worker's parcel, with room for `padded` bytes.
  static std::unique_ptr<Parcel> Make(uint64_t padded);
  // Maps the parcel in the transport. The caller still owns the descriptor. Throws ValueError if it
  // isn't a parcel or has too little room, and InternalError if it can't be mapped.
  static std::unique_ptr<Parcel> Open(int fd, uint64_t padded);
  ~Parcel();
  Parcel(const Parcel&) = delete;
  Parcel& operator=(const Parcel&) = delete;

  int fd() const { return fd_; }
  uint64_t room() const { return room_; }
  char* data() const { return map_.data() + kHead; }
  shm::Counter& done() const { return head().done; }
  const Answer& answer() const { return head().answer; }

  // Publishes the answer. After this call, the transport doesn't write to the parcel any more.
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
