// One rank's access to the segment of its cluster version. All parts of a host's communicator share
// this object.
#ifndef KUNGFU_COLLECTIVES_HOST_ENDPOINT_H_
#define KUNGFU_COLLECTIVES_HOST_ENDPOINT_H_

#include <cstdint>
#include <memory>

#include "base/forks.h"
#include "collectives/closure.h"
#include "collectives/communicator.h"
#include "transport/shm/segment.h"
#include "transport/shm/segment_control_block.h"

namespace kungfu::host {

struct Endpoint {
  const std::shared_ptr<shm::Segment> owner;
  shm::Segment& segment;
  shm::SegmentControlBlock control;
  const uint32_t rank;
  const uint32_t size;
  const uint64_t cluster_version;
  const CommunicatorOptions options;
  const bool oversubscribed;  // true if the host has more ranks than cores
  // The communicator owns these two objects:
  const OneProcess& process;
  const Closure& closure;
};

}  // namespace kungfu::host

#endif  // KUNGFU_COLLECTIVES_HOST_ENDPOINT_H_
