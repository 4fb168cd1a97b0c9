#include "collectives/operation.h"

#include <set>

#include "base/error.h"
#include "collectives/dtype.h"

namespace kungfu {
namespace {

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdu;
}

}  // namespace

void KeptOperation::Keep(const Operation& asked) {
  name = asked.name;
  layout = asked.layout == nullptr ? "" : asked.layout;
  tensors.assign(asked.tensors, asked.tensors + asked.num_tensors);
  operation = asked;
  operation.name = name.c_str();
  operation.layout = asked.layout == nullptr ? nullptr : layout.c_str();
  operation.tensors = tensors.data();
}

const char* NameOf(Kind kind) {
  static constexpr const char* kNames[] = {"all_reduce", "broadcast",  "all_gather", "reduce_scatter",
                                           "barrier",    "all_reduce", "all_gather"};
  return kNames[static_cast<uint8_t>(kind)];
}

std::string KeyOf(std::string_view name, uint8_t track, Stage stage) {
  std::string key;
  key.reserve(name.size() + 2);
  key.append(name).push_back(static_cast<char>(track));
  key.push_back(static_cast<char>(stage));
  return key;
}

const Operation& AskedFor(const Operation& operation) {
  const Operation* asked = &operation;
  while (asked->part.of != nullptr) asked = asked->part.of;
  return *asked;
}

std::string TitleOf(const Operation& operation) {
  const Operation& asked = AskedFor(operation);
  return Text(NameOf(asked.kind), " \"", asked.name, "\": ");
}

uint64_t SignatureOf(const Operation& operation) {
  if (operation.part.signature != 0) return operation.part.signature;
  uint64_t hash = operation.root;
  for (size_t i = 0; i < operation.num_tensors; i++) hash = Mix(hash, operation.tensors[i].count);
  if (operation.layout != nullptr) {
    for (const char* c = operation.layout; *c != '\0'; c++) hash = Mix(hash, static_cast<unsigned char>(*c));
  }
  if (operation.planes != nullptr) hash = Mix(hash, operation.planes->hash);
  if (operation.sources != nullptr) {
    for (const uint32_t rank : *operation.sources) hash = Mix(hash, rank);
  }
  const uint64_t op = Reduces(operation.kind) ? operation.op : 0;
  return (hash << 24) | static_cast<uint64_t>(operation.kind) << 16 | static_cast<uint64_t>(operation.dtype) << 8 | op;
}

uint64_t CountOf(const Operation& operation) {
  uint64_t count = 0;
  for (size_t i = 0; i < operation.num_tensors; i++) count += operation.tensors[i].count;
  return count;
}

void Validate(const Operation& operation, uint32_t size) {
  if (operation.name == nullptr || operation.name[0] == '\0') {
    throw Error(KF_INVALID, Text(NameOf(operation.kind), ": the name is empty; pass a name"));
  }
  const auto who = [&] { return Text(NameOf(operation.kind), " \"", operation.name, "\": "); };
  if (!IsDtype(operation.dtype)) throw Error(KF_TYPE, Text(who(), "no dtype has number ", int(operation.dtype)));
  if (!IsOp(operation.op)) throw Error(KF_INVALID, Text(who(), "no reduction has number ", int(operation.op)));
  if ((operation.kind == Kind::kBroadcast || IsToRoot(operation.kind)) && operation.root >= size) {
    throw Error(KF_INVALID, Text(who(), "root ", operation.root, " is not a rank of a cluster of ", size));
  }
  if (operation.sized_for_ranks != 0 && operation.sized_for_ranks != size) {
    throw Error(KF_STALE, Text(who(), "its tensors are sized for ", operation.sized_for_ranks,
                               " ranks, but the cluster has ", size, " now"));
  }
  for (size_t i = 0; operation.kind == Kind::kReduceScatter && i < operation.num_tensors; i++) {
    const uint64_t count = operation.tensors[i].count;
    if (count % size == 0) continue;
    throw Error(KF_INVALID, Text(who(), count, " elements can't be scattered evenly over ", size, " ranks"));
  }
}

void RequireMemory(const Operation& operation, bool inputs, bool outputs) {
  for (size_t i = 0; i < operation.num_tensors; i++) {
    const kf_tensor& tensor = operation.tensors[i];
    if (tensor.count == 0 || !((inputs && tensor.input == nullptr) || (outputs && tensor.output == nullptr))) continue;
    throw Error(KF_INVALID, Text(NameOf(operation.kind), " \"", operation.name, "\": tensor ", i, " has no memory"));
  }
}

std::string Describe(const Operation& part) {
  const Operation& operation = AskedFor(part);
  std::string text = NameOf(operation.kind);
  if (operation.kind == Kind::kBarrier) return text;
  text += Text(" of ", CountOf(operation), " ", NameOf(operation.dtype));
  if (operation.layout != nullptr && operation.layout[0] != '\0') text += Text(" ", operation.layout);
  if (operation.layout == nullptr && operation.num_tensors > 1) text += Text(" in ", operation.num_tensors, " tensors");
  if (Reduces(operation.kind)) text += Text(", ", NameOf(operation.op));
  if (operation.planes != nullptr) text += Text(" of shards (partition ", operation.planes->hash, ")");
  if (operation.kind == Kind::kBroadcast) text += Text(", root ", operation.root);
  if (operation.sources != nullptr) text += Text(", source ranks: ", operation.sources->size(), " ranks");
  return text;
}

std::string MismatchText(const char* whose, const std::string& name,
                         const std::vector<std::pair<std::string, std::string>>& brought) {
  constexpr std::string_view kClaim = " on parameters ";  // ms_kungfu/trained/claims.py
  constexpr std::string_view kGather = "all_gather of ";
  std::set<std::string> claims, counts;
  bool gathers = true;  // whether each rank called all_gather, without uneven=True
  for (const auto& [who, what] : brought) {
    const size_t at = what.find(kClaim);
    if (at != std::string::npos) claims.insert(what.substr(at, what.find(',', at) - at));
    gathers = gathers && what.rfind(kGather, 0) == 0 && what.find("(*") == std::string::npos;
    counts.insert(what.substr(0, what.find(' ', kGather.size())));
  }
  std::string text;
  if (claims.size() > 1) {
    text =
        "did you forget KungFuElasticCallback (in a loop: ElasticTraining or sync_net_parameters)? "
        "The workers begin with different parameters: ";
  }
  text += Text("the ", whose, " called different operations with the name \"", name, "\": ");
  for (size_t i = 0; i < brought.size(); i++) {
    text += Text(i == 0 ? "" : "; ", brought[i].first, ": ", brought[i].second);
  }
  if (gathers && counts.size() > 1) text += "; comm.all_gather(uneven=True) collects arrays of different lengths";
  return text;
}

}  // namespace kungfu
