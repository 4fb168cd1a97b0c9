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

// Of an operation over several hosts, what this one of a host does for it: bring a part, or hear the link's verdict,
// the result, or the text of a failure.
enum class Stage : uint8_t { kBring, kVerdict, kResult, kText };

// What a caller asks for; every rank has to bring an equal one under the same key.
struct Operation {
  Kind kind = Kind::kBarrier;
  const char* name = "";
  const kf_tensor* tensors = nullptr;
  size_t num_tensors = 0;
  kf_dtype dtype = KF_UINT8;
  kf_op op = KF_SUM;
  uint32_t root = 0;
  const char* layout = nullptr;
  // In a mean of floats the ranks count by their weights, if they differ: sum(weight * x) / sum(weight).
  bool weighted = false;
  uint32_t weight = 1;  // below 2^kWeightBits
  // The number of ranks that the tensors were sized for (0: nobody says): where the cluster has changed between that
  // and the call, an all-gather would write past the end of its outputs.
  uint32_t ranks = 0;
  // Of an all-reduce by which ranks bring more than their tensors, or nothing; null for all others.
  const Planes* planes = nullptr;
  // Not 0: what SignatureOf has to answer, for a part of a larger operation, whose tensors may be cut otherwise.
  uint64_t signature = 0;
  // Parts of a larger operation have its name, and are told apart by these; `track`: see hosts/slices.h.
  Stage stage = Stage::kBring;
  uint8_t track = 0;
  // The operation that it is a part of, which is the one that messages name.
  const Operation* part_of = nullptr;
  // Who waits in it sleeps at once: others need the core.
  bool patient = false;
  // Its lane may be kept by all when it is over: see host/lanes.cc.
  bool keeps = false;
  // Of a broadcast: the ranks that bring the same as its root, which is one of them, in ascending order; null: it
  // alone. Over several hosts one that has such a rank takes from its own; on one host they make no difference.
  const Members* givers = nullptr;
  // Where it is set, and the operation is weighted, gets what those who took part weigh together.
  uint64_t* total_weight = nullptr;
};
inline constexpr int kWeightBits = 24;

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
inline std::string KeyOf(const Operation& operation) { return KeyOf(operation.name, operation.track, operation.stage); }
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
// Throws ValueError, TypeError or StaleClusterError where it can't be run by `size` ranks, whatever they bring.
void Validate(const Operation& operation, uint32_t size);
// Throws ValueError where a tensor that has elements has no memory.
void RequireMemory(const Operation& operation, bool inputs, bool outputs);
// In words, for the message of a mismatch: what the caller asked for.
std::string Describe(const Operation& part);

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_OPERATION_H_
