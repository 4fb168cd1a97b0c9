// Collectives over device memory through pinned host memory, with the runtime's collectives between processes.
#ifndef KUNGFU_DEVICE_STAGING_H_
#define KUNGFU_DEVICE_STAGING_H_

#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "device/driver.h"

namespace kungfu::device {

// Not thread-safe. Always used by the same thread, in which the device is current.
//
// An operation is divided into chunks. Each chunk is one operation of the communicator and uses one of a ring of pinned
// buffers. While one chunk is reduced on the host, one stream copies the next chunks from the device, and another
// stream copies the previous chunks back. The copies in both directions and the reduction on the host run at the same
// time, so the slowest of the three determines the speed.
class Staging {
 public:
  Staging(Driver& driver, size_t chunk_bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Returns or throws only when none of the operation's work is running any more. The copies wait for `ready`. If a
  // rank fails during the call, chunks may have ended with different contributing ranks; the caller detects this.
  //
  // Throws the communicator's errors, which all ranks see. The first failure of this rank's device goes to `failure`
  // instead. The operation then continues with arbitrary data in the host memory, because the other ranks must not
  // wait for this rank.
  void Run(Communicator& communicator, const Operation& operation, const Mark& ready, std::optional<Error>* failure);

 private:
  static constexpr size_t kBuffers = 4;
  struct Piece {  // a part of a tensor in a chunk; numbers of elements
    size_t tensor, offset, at, count;
  };
  struct Chunk {
    size_t first, last;  // pieces
    size_t count;        // number of elements of a tensor; in a reduce-scatter, of one rank's part of it
  };
  class Plan;

  void Pipeline(Communicator& communicator, const Operation& operation, const Plan& plan, const Mark& ready);
  char* Buffer(size_t chunk, size_t bytes);
  template <typename Body>
  void Try(const Body& body);

  Driver& driver_;
  const size_t chunk_bytes_;
  Stream out_;  // from the device to the host
  Stream in_;   // from the host to the device
  std::array<Block, kBuffers> buffers_;
  std::vector<char> no_buffer_;              // used if a buffer could not be allocated
  std::optional<Error>* failure_ = nullptr;  // set during Run
};

// Waits until `done` returns true. Polls at first, then sleeps between the calls.
void Poll(const std::function<bool()>& done);

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_STAGING_H_
