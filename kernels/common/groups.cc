#include "common/groups.h"

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>
#include <utility>

#include "abstract/utils.h"

namespace mindspore::kernel::kungfu {
namespace {

struct DtypeOf {
  TypeId type;
  kf_dtype dtype;
  const char* name;
};

// Describes how a tensor's elements are sent.
struct Carried {
  kf_dtype dtype;
  std::string name;    // name of the elements' actual type
  uint64_t units;      // number of elements of `dtype` that are sent for one element of the tensor
  bool as_themselves;  // false if the elements are sent as integers of the same size
};

constexpr std::array<DtypeOf, 12> kDtypes = {{
    {kNumberTypeInt8, KF_INT8, "int8"},
    {kNumberTypeUInt8, KF_UINT8, "uint8"},
    {kNumberTypeInt16, KF_INT16, "int16"},
    {kNumberTypeUInt16, KF_UINT16, "uint16"},
    {kNumberTypeInt32, KF_INT32, "int32"},
    {kNumberTypeUInt32, KF_UINT32, "uint32"},
    {kNumberTypeInt64, KF_INT64, "int64"},
    {kNumberTypeUInt64, KF_UINT64, "uint64"},
    {kNumberTypeFloat16, KF_FLOAT16, "float16"},
    {kNumberTypeBFloat16, KF_BFLOAT16, "bfloat16"},
    {kNumberTypeFloat32, KF_FLOAT32, "float32"},
    {kNumberTypeFloat64, KF_FLOAT64, "float64"},
}};

// Every tensor of a tuple must be checked, because the kernel's attributes describe only the first
// one.
Carried FindDtype(const std::string& kernel, TypeId type, bool copies) {
  for (const auto& known : kDtypes) {
    if (known.type == type) {
      return {known.dtype, known.name, 1, true};
    }
  }
  if (copies) {
    switch (abstract::TypeIdSize(type)) {
      case 1:
        return {KF_UINT8, TypeIdToString(type), 1, false};
      case 2:
        return {KF_UINT16, TypeIdToString(type), 1, false};
      case 4:
        return {KF_UINT32, TypeIdToString(type), 1, false};
      case 8:
        return {KF_UINT64, TypeIdToString(type), 1, false};
      case 16:
        return {KF_UINT64, TypeIdToString(type), 2, false};
      default:
        break;
    }
  }
  throw std::runtime_error("TypeError: " + kernel + " doesn't accept a tensor of " + TypeIdToString(type) +
                           "; the supported dtypes are float16, bfloat16, float32, float64 and (u)int8 to (u)int64");
}

// Returns the shape in NumPy's format: "(2,3)", "(4,)", "()".
std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace

void Check(kf_status status) {
  if (status != KF_OK) {
    throw std::runtime_error(kf_last_error());
  }
}

uint64_t Count(const std::vector<int64_t>& shape) {
  uint64_t count = 1;
  for (const auto dim : shape) {
    count *= static_cast<uint64_t>(dim);
  }
  return count;
}

uint32_t ClusterSize() {
  uint32_t size = 0;
  Check(kf_cluster(nullptr, &size, nullptr));
  return size;
}

kf_op ReduceOpOf(const PrimitivePtr& primitive) {
  // The names must be in the same order as the values of `kf_op`.
  static const std::array<const char*, 5> kNames = {"sum", "mean", "min", "max", "prod"};
  const auto op = GetValue<std::string>(primitive->GetAttr("op"));
  const auto found = std::find(kNames.begin(), kNames.end(), op);
  if (found == kNames.end()) {
    throw std::runtime_error("InternalError: no reduction is called \"" + op +
                             "\"; op must be sum, mean, min, max or prod");
  }
  return static_cast<kf_op>(found - kNames.begin());
}

void Groups::Init(const PrimitivePtr& primitive) {
  name_ = GetValue<std::string>(primitive->GetAttr("channel"));
  if (const auto limit = primitive->GetAttr("fusion_bytes"); limit != nullptr) {
    fusion_bytes_ = GetValue<int64_t>(limit);
  }
}

void Groups::Sort(const std::string& kernel, const KernelTensors& inputs, const KernelTensors& outputs, bool copies,
                  const std::function<size_t(size_t)>& part_of) {
  std::map<std::pair<size_t, kf_dtype>, std::vector<size_t>> sorted;
  std::vector<std::string> shapes;
  std::vector<Carried> dtypes;
  input_counts_.clear();
  output_counts_.clear();
  for (size_t i = 0; i < inputs.size(); ++i) {
    dtypes.push_back(FindDtype(kernel, inputs[i]->dtype_id(), copies));
    sorted[{part_of(i), dtypes[i].dtype}].push_back(i);
    shapes.push_back(ShapeText(inputs[i]->GetShapeVector()));
    input_counts_.push_back(Count(inputs[i]->GetShapeVector()) * dtypes[i].units);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    output_counts_.push_back(Count(outputs[i]->GetShapeVector()) * (i < dtypes.size() ? dtypes[i].units : 1));
  }
  groups_.clear();
  std::vector<size_t> groups_of_part;
  for (const auto& [key, indices] : sorted) {
    const auto [part, dtype] = key;
    groups_of_part.resize(std::max(groups_of_part.size(), part + 1));
    int64_t filled = 0;
    for (size_t k = 0; k < indices.size(); ++k) {
      const auto nbytes = static_cast<int64_t>(inputs[indices[k]]->size());
      if (k == 0 || (fusion_bytes_ >= 0 && filled + nbytes > fusion_bytes_)) {
        groups_.push_back({dtype, part, {}, {}});
        groups_of_part[part]++;
        filled = 0;
      }
      groups_.back().indices.push_back(indices[k]);
      filled += nbytes;
    }
  }
  layouts_.assign(groups_of_part.size(), "");
  for (size_t i = 0; i < shapes.size(); ++i) {
    auto& layout = layouts_[part_of(i)];
    const bool named = groups_of_part[part_of(i)] > 1 || !dtypes[i].as_themselves;
    layout += (layout.empty() ? "" : " ") + (named ? dtypes[i].name + shapes[i] : shapes[i]);
  }
}

const std::vector<Group>& Groups::Bind(const std::string& kernel, const KernelTensors& inputs,
                                       const KernelTensors& outputs, bool in_place, uint32_t ranks,
                                       const std::function<uint64_t(uint64_t)>& output_count) {
  // When the graph was compiled, the output shape of a gather was computed for the cluster size at
  // that time. Without this check, a graph that was compiled before a resize would write past the
  // end of its buffers.
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (outputs.size() != inputs.size() || output_counts_[i] != output_count(input_counts_[i])) {
      throw std::runtime_error(
          "StaleClusterError: " + kernel + " \"" + name_ + "\" was compiled for an output of " +
          (outputs.size() == inputs.size() ? std::to_string(output_counts_[i]) : "another number of") +
          " elements, but " + std::to_string(ranks) + " ranks need " + std::to_string(output_count(input_counts_[i])) +
          ": the cluster size has changed; build the cell or the jit function again");
    }
  }
  for (auto& group : groups_) {
    group.tensors.clear();
    for (const auto i : group.indices) {
      auto* output = in_place ? inputs[i]->device_ptr() : outputs[i]->device_ptr();
      group.tensors.push_back({inputs[i]->device_ptr(), output, input_counts_[i]});
    }
  }
  return groups_;
}

}  // namespace mindspore::kernel::kungfu
