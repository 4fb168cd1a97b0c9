// The messages between transports, and the types that a transport's threads share. Only
// transport.cc and transport_operation.cc include this file. Numbers in comments refer to the
// invariants in transport.h.
#ifndef KUNGFU_COLLECTIVES_HOSTS_TRANSPORT_STATE_H_
#define KUNGFU_COLLECTIVES_HOSTS_TRANSPORT_STATE_H_

#include <cstdint>
#include <vector>

#include "base/interrupt.h"
#include "collectives/hosts/scratch.h"
#include "collectives/hosts/transport.h"

namespace kungfu::hosts {

inline constexpr uint64_t kFirstEpoch = 1;

// A host's header in one round of an operation (see invariant 2).
struct Transport::Header {
  uint64_t got = 0;     // the epoch in which the host got its outcome, or 0 if it has no outcome: see invariant 8
  uint32_t failed = 0;  // not 0 if the operation has failed on the host's ranks; `text` then describes the error
  uint32_t none = 0;    // not 0 if no rank of the host is running, so that the host contributes nothing
  uint32_t absent = 0;  // set by the receiver if the host never joined this operation or has left it
  uint32_t given = 0;   // not 0 if the absent host has given its ranks the outcome
  uint32_t status = KF_OK;
  uint32_t missing = 0;  // number of the host's failed ranks that didn't contribute
  // The earliest generation that the contribution fits. If there are planes, the generation of the
  // planes.
  uint32_t generation = 0;
  uint64_t signature = 0, count = 0;
  uint64_t weight = 0;
  Figures figures;      // the host's measurements of its network: see invariant 12
  char text[208] = {};  // a description of the contribution
  // The contribution itself, if it is so small that SmallBytes isn't 0 (see invariant 13).
  alignas(8) char contribution[kSmallBytes] = {};
};

// The state of a host (see invariants 6 and 9). A second message contains three numbers for each
// name: the hash of the name, the number of operations that the host's ranks have begun, and the
// number of operations whose outcome these ranks have.
struct Transport::Ending {
  enum What : uint32_t { kGoesOn = 0, kNoRanks = 1, kLeft = 2, kFailed = 3 };
  uint32_t what = kGoesOn;
  uint32_t status = KF_OK;
  uint64_t names = 0;
  char text[kTextBytes] = {};
};

// Thrown if another host never joined this operation or has left it. If `gave` is true, the host
// has given its ranks the outcome. Otherwise its ranks have failed.
struct AbsentHost : Interrupted {
  explicit AbsentHost(bool has_given) : Interrupted("the end of a host's contribution"), gave(has_given) {}
  bool gave;
};

// Thrown if the ranks of another host have finished, although other ranks still need them.
struct HostLeft : Error {
  using Error::Error;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_TRANSPORT_STATE_H_
