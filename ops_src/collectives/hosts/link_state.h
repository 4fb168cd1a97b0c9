// What links tell each other, and what a thread of a link works with. Only for link.cc and link_operation.cc.
#ifndef KUNGFU_COLLECTIVES_HOSTS_LINK_STATE_H_
#define KUNGFU_COLLECTIVES_HOSTS_LINK_STATE_H_

#include <cstdint>
#include <vector>

#include "base/interrupt.h"
#include "base/memory.h"
#include "collectives/hosts/link.h"

namespace kungfu::hosts {

inline constexpr uint64_t kEpoch = 1;  // of a link's mesh, for as long as it lives

// Of one round of an operation; see 2.
struct Link::Header {
  uint32_t failed = 0;  // its ranks brought something that can't be: `text` says what
  uint32_t none = 0;    // no rank of the host lives, and it brings nothing
  uint32_t status = KF_OK;
  uint32_t reserved = 0;
  uint32_t missing = 0;     // how many of its dead have no part in what it has
  uint32_t generation = 0;  // the earliest that this fits; with planes, the one that it was made for
  uint64_t signature = 0, count = 0;
  uint64_t weight = 0;
  char text[208] = {};  // what was brought, in words
};

// Nothing begins on a host any more; see 6. Followed by `names` pairs: hash of a name, operations begun under it.
struct Link::Ending {
  enum What : uint32_t { kDead = 1, kLeft = 2, kFailed = 3 };
  uint32_t what = 0;
  uint32_t status = KF_OK;
  uint64_t names = 0;
  char text[kTextBytes] = {};
};

// Of one operation at a time.
struct Link::Scratch {
  Memory part, result, other;
  char* data = nullptr;    // what its ranks brought, then the result
  uint64_t elements = 0;   // of the result
  uint64_t signature = 0;  // of what they brought
  Planes planes;           // likewise
};

// The other host's link has said that it has no part in this operation.
struct VoidHost : Interrupted {
  VoidHost() : Interrupted("the end of a host's ranks") {}
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_LINK_STATE_H_
