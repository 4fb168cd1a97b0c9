// The description of a collective operation.
#ifndef KUNGFU_COLLECTIVES_OPERATION_H_
#define KUNGFU_COLLECTIVES_OPERATION_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "collectives/planes.h"
#include "kungfu/c_api.h"

namespace kungfu {

// The ranks that run an operation together, in ascending order.
using Members = std::vector<uint32_t>;

// kReduceTo and kGatherTo work like an all-reduce and an all-gather, but only the root gets the
// result, and the root contributes nothing. The ranks of a host use these two kinds to send their
// contributions to the host's transport.
enum class Kind : uint8_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kBarrier, kReduceTo, kGatherTo };
inline constexpr uint32_t kNumKinds = 7;

// The stages of an operation over several hosts, within one host. First the ranks send their
// contributions to the transport. Then the transport sends its commit, followed by the result or an
// error text.
enum class Stage : uint8_t { kBring, kCommit, kResult, kText };

struct Operation;

// The weights in a mean of floats, which is sum(weight * x) / sum(weight).
struct Weighting {
  bool applies = false;
  uint32_t own = 1;           // this rank's weight, below 2^kWeightBits
  uint64_t* total = nullptr;  // receives the sum of the weights of all contributing ranks
};
inline constexpr int kWeightBits = 24;

// Set if this operation is a part of a larger operation (the whole). The part is either one slice
// of the whole, or the whole restricted to the ranks of one host.
struct PartOfWhole {
  const Operation* of = nullptr;  // the whole, which error messages name
  // Parts have the same name as the whole. `stage` and `track` (hosts/slices.h) distinguish the
  // parts.
  Stage stage = Stage::kBring;
  uint8_t track = 0;
  uint64_t signature = 0;    // if not 0, SignatureOf returns this value, because ranks may divide the part's tensors
                             // differently
  bool patient = false;      // a waiting rank sleeps immediately, because other threads need the core
  bool pins_buffer = false;  // members may keep the staging buffer: see host/staging_buffers.cc
};

// A collective operation. Every rank must run an equal operation with the same key (KeyOf).
struct Operation {
  // The arguments of the C ABI's functions. Only reductions use `op`. Only broadcasts, kReduceTo
  // and kGatherTo use `root`.
  Kind kind = Kind::kBarrier;
  const char* name = "";
  const kf_tensor* tensors = nullptr;
  size_t num_tensors = 0;
  kf_dtype dtype = KF_UINT8;
  kf_op op = KF_SUM;
  uint32_t root = 0;
  const char* layout = nullptr;

  // Each field below enables one feature. The default value disables the feature.
  Weighting weighting = {};
  // The number of ranks for which the tensors are sized, or 0 for any number. Prevents an
  // all-gather from writing past the end of outputs that were allocated for a smaller cluster.
  uint32_t sized_for_ranks = 0;
  // Set for an all-reduce to which a rank contributes several sets of tensors, or none (see
  // planes.h).
  const Planes* planes = nullptr;
  // The ranks that have the data of a broadcast, including the root, in ascending order. Null if
  // only the root has the data. A host that contains one of these ranks copies the data from that
  // rank.
  const Members* sources = nullptr;
  PartOfWhole part = {};
};

// An operation that owns copies of its name, its layout and its list of tensors. The caller still
// owns the tensors' memory.
struct KeptOperation {
  void Keep(const Operation& asked);

  std::string name, layout;
  std::vector<kf_tensor> tensors;
  Operation operation;  // refers to the members above
};

const char* NameOf(Kind kind);
// Returns the key by which ranks match operations. It contains the name, the track and the stage.
std::string KeyOf(std::string_view name, uint8_t track = 0, Stage stage = Stage::kBring);
inline std::string KeyOf(const Operation& operation) {
  return KeyOf(operation.name, operation.part.track, operation.part.stage);
}
// Returns the whole to which `operation` belongs, or `operation` itself if it isn't a part.
const Operation& AskedFor(const Operation& operation);
// Returns the prefix of messages about the operation: its kind and name (for a part, those of the
// whole), a colon and a space.
std::string TitleOf(const Operation& operation);

inline bool Reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter || kind == Kind::kReduceTo;
}
// Returns true if only the root gets the result, and the root contributes nothing.
inline bool IsToRoot(Kind kind) { return kind == Kind::kReduceTo || kind == Kind::kGatherTo; }

// Returns a number by which ranks detect that they run different operations. Equal operations have
// equal numbers. Different operations have different numbers, unless their hashes collide. Ranks
// compare the total number of elements separately.
uint64_t SignatureOf(const Operation& operation);
// Returns the number of elements that a rank contributes.
uint64_t CountOf(const Operation& operation);
// Throws ValueError, TypeError or StaleClusterError if a cluster of `size` ranks can't run the operation.
void Validate(const Operation& operation, uint32_t size);
// Throws ValueError if the memory of a nonempty tensor is null.
void RequireMemory(const Operation& operation, bool inputs, bool outputs);
// Returns a description of the caller's operation for a mismatch error.
std::string Describe(const Operation& part);

// Returns the message of a mismatch error. `whose` is "ranks" or "hosts". Each entry of `brought`
// names some ranks or hosts and describes their operation. If the ranks have different parameters
// (see SetClaim in peer.h), the message begins with the likely mistake.
std::string MismatchText(const char* whose, const std::string& name,
                         const std::vector<std::pair<std::string, std::string>>& brought);

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_OPERATION_H_
