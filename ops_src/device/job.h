// One operation over device memory.
#ifndef KUNGFU_DEVICE_JOB_H_
#define KUNGFU_DEVICE_JOB_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/communicator.h"
#include "device/driver.h"

namespace kungfu::device {

struct Job {
  std::shared_ptr<Communicator> communicator;
  std::string name, layout;
  std::vector<kf_tensor> tensors;
  Operation operation;  // of the above
  uint64_t key = 0;
  uint64_t signature = 0;
  uint32_t sequence = 0;
  std::chrono::steady_clock::time_point since;
  Mark ready;                   // on the caller's stream
  std::unique_ptr<Block> kept;  // the inputs of a reduction in place, for doing it again
  bool by_staging = false;
  std::optional<Error> failure;  // of this rank's device, before the others know

  // Guarded by the device's mutex:
  bool ended = false;
  std::optional<Error> error;
  uint32_t members = 0;  // that took part
};
using JobPtr = std::shared_ptr<Job>;

}  // namespace kungfu::device

#endif  // KUNGFU_DEVICE_JOB_H_
