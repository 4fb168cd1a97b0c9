// What each rank has to say, at every rank.
#ifndef KUNGFU_COLLECTIVES_GATHER_H_
#define KUNGFU_COLLECTIVES_GATHER_H_

#include <cstring>
#include <type_traits>
#include <vector>

#include "collectives/communicator.h"

namespace kungfu {

template <typename T>
struct Gathered {
  std::vector<T> rows;  // by rank
  Members members;      // the ranks that contributed; rows of failed ones are zeros

  // That of the lowest rank that contributed, which decides if one rank has to.
  const T& first() const { return rows[members.front()]; }
};

// Collective. The same answer at all ranks that contributed. Throws what Communicator::Run throws.
template <typename T>
Gathered<T> GatherLiving(Communicator& communicator, const char* name, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  Gathered<T> all{std::vector<T>(communicator.size()), {}};
  std::memset(static_cast<void*>(all.rows.data()), 0, all.rows.size() * sizeof(T));
  const kf_tensor tensor{&mine, all.rows.data(), sizeof(T)};
  all.members = communicator.MembersOf(communicator.Run({Kind::kAllGather, name, &tensor, 1}));
  return all;
}

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_GATHER_H_
