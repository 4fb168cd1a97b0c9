// What a caller asks of the ranks.
#ifndef KUNGFU_COLLECTIVES_OPERATION_H_
#define KUNGFU_COLLECTIVES_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/planes.h"
#include "kungfu/c_api.h"

namespace kungfu {

// Ranks that are in an operation together, in ascending order.
using Members = std::vector<uint32_t>;

// The last two are halves of what goes between hosts: of an all-reduce and an all-gather whose result only the root
// gets, which brings nothing.
enum class Kind : uint8_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kBarrier, kReduceTo, kGatherTo };
inline constexpr uint32_t kNumKinds = 7;

// Of an operation over several hosts, what this one of a host does for it: bring a contribution, or receive the
// transport's commit, the result, or the text of a failure.
enum class Stage : uint8_t { kBring, kCommit, kResult, kText };

struct Operation;

// Of a mean of floats whose ranks count by their weights: sum(weight * x) / sum(weight).
struct Weighting {
  bool applies = false;
  uint32_t own = 1;           // this rank's, below 2^kWeightBits
  uint64_t* total = nullptr;  // gets the sum of the contributing ranks' weights
};
inline constexpr int kWeightBits = 24;

// Of an operation that a communicator runs for a larger one, its whole: for a slice, or for a host's ranks alone.
struct PartOfWhole {
  const Operation* of = nullptr;  // the whole, which messages name
  // Parts have the name of the whole. These tell them apart; `track`: see hosts/slices.h.
  Stage stage = Stage::kBring;
  uint8_t track = 0;
  uint64_t signature = 0;    // not 0: the answer of SignatureOf, since the part's tensors may be cut otherwise
  bool patient = false;      // a rank that waits in it sleeps at once, because others need the core
  bool pins_buffer = false;  // its members may keep its staging buffer after its end: see host/staging_buffers.cc
};

// What a caller asks for; every rank has to bring an equal one under the same key.
struct Operation {
  // What the functions of the C ABI take. `op` is of reductions, `root` of broadcasts and of what goes to a root.
  Kind kind = Kind::kBarrier;
  const char* name = "";
  const kf_tensor* tensors = nullptr;
  size_t num_tensors = 0;
  kf_dtype dtype = KF_UINT8;
  kf_op op = KF_SUM;
  uint32_t root = 0;
  const char* layout = nullptr;

  // One feature each. An operation that doesn't use it leaves it as it is.
  Weighting weighting = {};
  // The number of ranks that the tensors are sized for; 0: any. An all-gather would write past the end of its outputs
  // if the cluster has changed since they were made.
  uint32_t sized_for_ranks = 0;
  // An all-reduce to which ranks bring more than their tensors, or nothing.
  const Planes* planes = nullptr;
  // A broadcast whose data several ranks have, the root among them, in ascending order. Over several hosts a host with
  // such a rank takes the data from it.
  const Members* sources = nullptr;
  PartOfWhole part = {};
};

// One that outlives its caller's: its name, its layout and its list of tensors are its own, their memory is not.
struct KeptOperation {
  void Keep(const Operation& asked);

  std::string name, layout;
  std::vector<kf_tensor> tensors;
  Operation operation;  // of the above
};

const char* NameOf(Kind kind);
// What ranks match operations by: a name, and which part of an operation of that name it is.
std::string KeyOf(std::string_view name, uint8_t track = 0, Stage stage = Stage::kBring);
inline std::string KeyOf(const Operation& operation) {
  return KeyOf(operation.name, operation.part.track, operation.part.stage);
}
// What the caller asked for: the operation itself, or that of which it is a part of a part.
const Operation& AskedFor(const Operation& operation);
// How messages about it begin: what the caller asked for, with a colon and a space.
std::string TitleOf(const Operation& operation);

inline bool Reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter || kind == Kind::kReduceTo;
}
// Whether there is one that only the root gets, and to which it brings nothing.
inline bool IsToRoot(Kind kind) { return kind == Kind::kReduceTo || kind == Kind::kGatherTo; }

// Equal at all ranks if and (but for the hash) only if they bring the same operation, but for the number of elements.
uint64_t SignatureOf(const Operation& operation);
// The elements that a rank brings.
uint64_t CountOf(const Operation& operation);
// Throws ValueError, TypeError or StaleClusterError if it can't be run by `size` ranks, whatever they bring.
void Validate(const Operation& operation, uint32_t size);
// Throws ValueError if a tensor that has elements has no memory.
void RequireMemory(const Operation& operation, bool inputs, bool outputs);
// In words, for the message of a mismatch: what the caller asked for.
std::string Describe(const Operation& part);

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_OPERATION_H_
