// An all-reduce, by its way.
#include "base/float_environment.h"
#include "collectives/dtype.h"
#include "collectives/hosts/operations.h"

namespace kungfu::hosts {

void AllReduce(const Group& group, const tcp::Tag& tag, const Way& way, kf_dtype dtype, kf_op op, const void* in,
               void* out, size_t count) {
  if (!IsDtype(dtype) || !IsOp(op)) throw Error(KF_TYPE, "all_reduce between hosts: no such dtype or reduction");
  if (op == KF_MEAN) throw Error(KF_INVALID, "all_reduce between hosts: a mean is a sum that its callers divide");
  const DefaultFloatEnvironment environment;
  switch (way.kind) {
    case Way::kDoubling:
      return AllReduceByDoubling(group, tag, dtype, op, in, out, count);
    case Way::kRing:
      return AllReduceByRing(group, tag, dtype, op, in, out, count);
    case Way::kTrees:
      return AllReduceByTrees(group, tag, way, dtype, op, in, out, count);
  }
}

}  // namespace kungfu::hosts
