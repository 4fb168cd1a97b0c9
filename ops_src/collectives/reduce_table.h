// The reductions for one instruction set. reduce_kernels.cc is compiled once per instruction set,
// each time with a different namespace and different flags. reduce.cc chooses a table at run time.
#ifndef KUNGFU_COLLECTIVES_REDUCE_TABLE_H_
#define KUNGFU_COLLECTIVES_REDUCE_TABLE_H_

#include "collectives/dtype.h"
#include "collectives/reduce.h"

namespace kungfu {

struct ReduceTable {
  ReduceFn fn[kNumDtypes][kNumOps];
  BlendFn blend[kNumDtypes];
  DivideFn divide[kNumDtypes];
};

namespace baseline {
extern const ReduceTable kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const ReduceTable kTable;
}
namespace avx512 {
extern const ReduceTable kTable;
}
#endif

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_REDUCE_TABLE_H_
