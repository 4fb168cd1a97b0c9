// Collectives on device memory. The data goes through pinned host memory and the runtime's
// collectives between processes.
#ifndef KUNGFU_DEVICE_STAGING_H_
#define KUNGFU_DEVICE_STAGING_H_

#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "device/driver.h"

namespace kungfu::device {

// Not thread-safe. The same thread must make all calls, and the device must be current in this
// thread.
//
// An operation is divided into chunks. Each chunk is one operation of the communicator, and uses
// one buffer from a ring of pinned buffers. While the host reduces one chunk, one stream copies the
// next chunks from the device, and another stream copies the previous chunks back. The two copies
// and the reduction run at the same time, so the slowest of the three determines the speed.
class Staging {
 public:
  Staging(Driver& driver, size_t chunk_bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Returns or throws only when none of the operation's work is running any more. The copies wait
  // for `ready`. If a rank fails during the call, the chunks may have ended with different
  // contributing ranks. The caller must detect this.
  //
  // Throws the communicator's errors, which all ranks see. A failure of this rank's device isn't
  // thrown: the first one is stored in `failure`. The operation then continues with arbitrary data
  // in host memory, because the other ranks must not wait for this rank.
  void Run(Communicator& communicator, const Operation& operation, const Mark& ready, std::optional<Error>* failure);

 private:
  static constexpr size_t kBuffers = 4;
  struct Piece {  // the part of a tensor that is in a chunk, in elements
    size_t tensor, offset, at, count;
  };
  struct Chunk {
    size_t first, last;  // range of pieces
    size_t count;        // number of elements in a tensor; in a reduce-scatter, in one rank's part of the tensor
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
  std::vector<char> no_buffer_;              // replaces a buffer that could not be allocated
  std::optional<Error>* failure_ = nullptr;  // set during `Run`
};

// Calls `done` until it returns true. Polls at first, then sleeps between the calls.
void Poll(const std::function<bool()>& done);

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_STAGING_H_
