// What transports send each other, and what a thread of a transport works with. Only for transport.cc and
// transport_operation.cc.
#ifndef KUNGFU_COLLECTIVES_HOSTS_TRANSPORT_STATE_H_
#define KUNGFU_COLLECTIVES_HOSTS_TRANSPORT_STATE_H_

#include <cstdint>
#include <vector>

#include "base/interrupt.h"
#include "collectives/hosts/scratch.h"
#include "collectives/hosts/transport.h"

namespace kungfu::hosts {

inline constexpr uint64_t kFirstEpoch = 1;

// Of one round of an operation; see 2.
struct Transport::Header {
  uint64_t got = 0;     // the epoch in which it got the outcome that it has; 0: it has none. See 8
  uint32_t failed = 0;  // its ranks brought something that can't be: `text` says what
  uint32_t none = 0;    // no rank of the host lives, and it brings nothing
  uint32_t absent = 0;  // set here: it isn't in this operation (any more), and has
  uint32_t given = 0;   // given its ranks the outcome
  uint32_t status = KF_OK;
  uint32_t missing = 0;     // how many of its failed ranks didn't contribute
  uint32_t generation = 0;  // the earliest that this fits; with planes, the one that it was made for
  uint64_t signature = 0, count = 0;
  uint64_t weight = 0;
  Figures figures;      // of its network, as it has measured them: see 12
  char text[208] = {};  // what was brought, in words
  // And itself, if it has SmallBytes: see 13.
  alignas(8) char contribution[kSmallBytes] = {};
};

// How it stands with a host: see 6, and 9. Followed by three numbers for each name: its hash, operations begun under
// it, operations given.
struct Transport::Ending {
  enum What : uint32_t { kGoesOn = 0, kNoRanks = 1, kLeft = 2, kFailed = 3 };
  uint32_t what = kGoesOn;
  uint32_t status = KF_OK;
  uint64_t names = 0;
  char text[kTextBytes] = {};
};

// The other host's transport isn't in this operation (any more): it `gave` its ranks the outcome, or else they have
// failed.
struct AbsentHost : Interrupted {
  explicit AbsentHost(bool has_given) : Interrupted("the end of a host's contribution"), gave(has_given) {}
  bool gave;
};

// Its ranks have finished, and others count on them.
struct HostLeft : Error {
  using Error::Error;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_TRANSPORT_STATE_H_
