// Launches a kernel as MindSpore does: primitive with attributes, Init, Resize, Launch on a stream.
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "include/runtime/hardware_abstract/kernel_base/common_utils.h"
#include "include/runtime/hardware_abstract/kernel_base/kernel.h"

using mindspore::kernel::KernelMod;
using mindspore::kernel::KernelTensor;

struct Tensor {
  void* memory;
  int64_t count;
  const char* dtype;  // float32, int16, int64, uint32, uint64 or bool
};

namespace {

mindspore::TypePtr TypeOf(const std::string& name) {
  if (name == "float32") return mindspore::kFloat32;
  if (name == "int16") return mindspore::kInt16;
  if (name == "int64") return mindspore::kInt64;
  if (name == "uint32") return mindspore::kUInt32;
  if (name == "uint64") return mindspore::kUInt64;
  if (name == "bool") return mindspore::kBool;
  throw std::runtime_error("no dtype " + name);
}

// "op=sum;root=#1;prefetch=!;names=[a,b;group_of=[#0,#1": texts, numbers (#), false (!) and lists ([).
mindspore::ValuePtr ValueOf(const std::string& text) {
  if (text == "!") return mindspore::MakeValue(false);
  if (text[0] == '#') return mindspore::MakeValue(static_cast<int64_t>(std::stol(text.substr(1))));
  if (text[0] != '[') return mindspore::MakeValue(text);
  std::vector<std::string> texts;
  std::vector<int64_t> numbers;
  std::istringstream list(text.substr(1));
  for (std::string item; std::getline(list, item, ',');) {
    if (item[0] == '#') {
      numbers.push_back(std::stol(item.substr(1)));
    } else {
      texts.push_back(item);
    }
  }
  return numbers.empty() ? mindspore::MakeValue(texts) : mindspore::MakeValue(numbers);
}

using Holder = std::vector<std::unique_ptr<KernelTensor>>;

std::vector<KernelTensor*> Make(const Tensor* tensors, size_t count, Holder* holder) {
  std::vector<KernelTensor*> made;
  for (size_t i = 0; i < count; i++) {
    const auto type = TypeOf(tensors[i].dtype);
    holder->push_back(std::make_unique<KernelTensor>(
        std::make_shared<mindspore::abstract::TensorShape>(mindspore::ShapeVector{tensors[i].count}),
        std::make_shared<mindspore::TensorType>(type), nullptr));
    holder->back()->set_device_ptr(tensors[i].memory);
    holder->back()->set_size(static_cast<size_t>(tensors[i].count) * mindspore::abstract::TypeIdSize(type->type_id()));
    made.push_back(holder->back().get());
  }
  return made;
}

}  // namespace

// 0, or 1 with what was thrown in `message`.
extern "C" __attribute__((visibility("default"))) int launch(KernelMod* kernel, const char* name,
                                                             const char* attributes, const Tensor* inputs,
                                                             size_t num_inputs, const Tensor* outputs,
                                                             size_t num_outputs, void* stream, char* message,
                                                             size_t room) {
  Holder holder;
  int failed = 0;
  try {
    const auto primitive = std::make_shared<mindspore::Primitive>(name);
    std::istringstream list(attributes);
    for (std::string one; std::getline(list, one, ';');) {
      const size_t equals = one.find('=');
      primitive->AddAttr(one.substr(0, equals), ValueOf(one.substr(equals + 1)));
    }
    const auto in = Make(inputs, num_inputs, &holder);
    const auto out = Make(outputs, num_outputs, &holder);
    if (!kernel->Init(primitive, in, out)) throw std::runtime_error("Init returned false");
    if (kernel->Resize(in, out) != 0) throw std::runtime_error("Resize did not return 0");
    if (!kernel->Launch(in, {}, out, stream)) throw std::runtime_error("Launch returned false");
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), room - 1);
    failed = 1;
  }
  for (const auto& tensor : holder) tensor->set_device_ptr(nullptr);  // not theirs
  return failed;
}
