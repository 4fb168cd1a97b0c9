#include "collectives/reduce.h"

#include "collectives/reduce_table.h"

namespace kungfu {
namespace {

struct Choice {
  const ReduceTable* table;
  const char* name;
};

Choice Choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return {&avx512::kTable, "avx512"};
  }
  if (__builtin_cpu_supports("avx2")) return {&avx2::kTable, "avx2"};
#endif
  return {&baseline::kTable, "baseline"};
}

const Choice& Chosen() {
  static const Choice choice = Choose();
  return choice;
}

}  // namespace

ReduceFn ReductionFor(kf_dtype dtype, kf_op op) { return Chosen().table->fn[dtype][op]; }

BlendFn BlendFor(kf_dtype dtype) { return Chosen().table->blend[dtype]; }

DivideFn DivisionFor(kf_dtype dtype) { return Chosen().table->divide[dtype]; }

const char* ReductionInstructionSet() { return Chosen().name; }

}  // namespace kungfu
