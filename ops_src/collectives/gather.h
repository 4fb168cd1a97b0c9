// Gathers one value from each rank, and gives all values to every rank.
#ifndef KUNGFU_COLLECTIVES_GATHER_H_
#define KUNGFU_COLLECTIVES_GATHER_H_

#include <cstring>
#include <type_traits>
#include <vector>

#include "collectives/communicator.h"

namespace kungfu {

template <typename T>
struct Gathered {
  std::vector<T> rows;  // indexed by rank
  Members members;      // the ranks that contributed; the rows of all other ranks contain zeros

  // Returns the row of the lowest rank that contributed. Callers use this row if one rank must
  // decide for all ranks.
  const T& first() const { return rows[members.front()]; }
};

// Gathers the value `mine` from each rank that hasn't failed. Collective. Returns the same result
// on all ranks that contributed. Throws the same errors as Communicator::Run.
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
