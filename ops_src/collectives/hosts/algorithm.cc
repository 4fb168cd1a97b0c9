#include "collectives/hosts/algorithm.h"

#include "base/float_environment.h"
#include "collectives/dtype.h"

namespace kungfu::hosts {

void Algorithm::Run(const AllReduceCall& call) const {
  if (!IsDtype(call.dtype) || !IsOp(call.op)) {
    throw Error(KF_TYPE, "all_reduce between hosts: unknown dtype or reduction");
  }
  if (call.op == KF_MEAN) {
    throw Error(KF_INVALID, "all_reduce between hosts: mean is not supported; scale the inputs and request a sum");
  }
  const Range runs = range();
  const uint64_t bytes = call.count * SizeOf(call.dtype);
  if (!runs.Has(call.group.size(), bytes)) {
    throw Error(KF_INVALID, Text("all_reduce between hosts: algorithm \"", name(), "\" with ", call.group.size(),
                                 " hosts and ", bytes, " bytes: it requires at least ", runs.least_hosts,
                                 " hosts and at most ", runs.most_bytes, " bytes"));
  }
  const DefaultFloatEnvironment environment;
  RunInRange(call);
}

}  // namespace kungfu::hosts
