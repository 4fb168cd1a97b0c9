// Collectives over device memory by way of pinned host memory and the runtime's collectives between processes.
#ifndef KUNGFU_DEVICE_STAGING_H_
#define KUNGFU_DEVICE_STAGING_H_

#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "device/driver.h"

namespace kungfu::device {

// One thread at a time, always the same, which has the device current.
//
// An operation is cut into chunks, each of them an operation of the communicator, and the chunks go through a ring of
// pinned buffers: while one is reduced on the host, the next ones come from the device on one stream and the last ones
// go back on another. A device copies both ways at once, and the host reduces meanwhile, so the slowest of the three
// sets the pace.
class Staging {
 public:
  Staging(Driver& driver, size_t chunk_bytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Returns, or throws, when nothing of it is under way any more. `ready`: what the tensors' memory waits for. Chunks
  // may have ended with different ranks in them if one has failed meanwhile; the caller finds that out.
  //
  // Throws what the communicator throws, which all ranks see. A failure of this device alone goes to `failure`, the
  // first one, and the operation goes on with whatever is in the host's memory: the others must not wait for this rank.
  void Run(Communicator& communicator, const Operation& operation, const Mark& ready, std::optional<Error>* failure);

 private:
  static constexpr size_t kBuffers = 4;
  struct Piece {  // of a tensor in a chunk; in elements
    size_t tensor, offset, at, count;
  };
  struct Chunk {
    size_t first, last;  // pieces
    size_t count;        // elements: of a tensor, of one rank's part of it in a reduce-scatter
  };
  class Plan;

  void Pipeline(Communicator& communicator, const Operation& operation, const Plan& plan, const Mark& ready);
  char* Buffer(size_t chunk, size_t bytes);
  template <typename Body>
  void Try(const Body& body);

  Driver& driver_;
  const size_t chunk_bytes_;
  Stream out_;  // of the device
  Stream in_;
  std::array<Block, kBuffers> buffers_;
  std::vector<char> no_buffer_;              // in the place of one that could not be allocated
  std::optional<Error>* failure_ = nullptr;  // during Run
};

// Waits until `done` says so: polls at first, then sleeps in between.
void Poll(const std::function<bool()>& done);

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_STAGING_H_
