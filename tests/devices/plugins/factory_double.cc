// A strict double of libmindspore_ops_ascend.so, of which it has MindSpore's factory of custom kernels, written against
// MindSpore's header.
#include <cstdio>
#include <cstdlib>

#include "include/kernel/ascend/custom/kernel_mod_impl/custom_kernel_factory.h"

namespace mindspore::kernel {

CustomKernelFactory& CustomKernelFactory::Instance() {
  static CustomKernelFactory factory;
  return factory;
}

bool CustomKernelFactory::Register(const std::string& op_name, const KernelCreator& creator) {
  if (op_name.empty() || creator == nullptr || !creators_.emplace(op_name, creator).second) {
    std::fprintf(stderr, "double of the factory: \"%s\" is registered twice, or without a creator\n", op_name.c_str());
    std::abort();
  }
  return true;
}

KernelModPtr CustomKernelFactory::Create(const std::string& op_name) {
  const auto found = creators_.find(op_name);
  return found == creators_.end() ? nullptr : found->second();
}

bool CustomKernelFactory::IsRegistered(const std::string& op_name) { return creators_.count(op_name) != 0; }

}  // namespace mindspore::kernel
