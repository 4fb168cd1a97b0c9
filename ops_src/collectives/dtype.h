// Names and sizes of the C ABI's element types, and names of its reductions.
#ifndef KUNGFU_COLLECTIVES_DTYPE_H_
#define KUNGFU_COLLECTIVES_DTYPE_H_

#include <cstddef>

#include "kungfu/c_api.h"

namespace kungfu {

inline constexpr int kNumDtypes = KF_FLOAT64 + 1;
inline constexpr int kNumOps = KF_PROD + 1;

// Call these functions before you convert a number to the enum. The conversion of a number without
// a matching enumerator is undefined behaviour.
inline bool IsDtype(int number) { return number >= KF_INT8 && number <= KF_FLOAT64; }
inline bool IsOp(int number) { return number >= KF_SUM && number <= KF_PROD; }

struct DtypeFacts {
  const char* name;
  size_t size;
};
inline constexpr DtypeFacts kDtypes[] = {
    {"int8", 1},  {"uint8", 1},  {"int16", 2},   {"uint16", 2},   {"int32", 4},   {"uint32", 4},
    {"int64", 8}, {"uint64", 8}, {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8},
};
inline constexpr const char* kOps[] = {"sum", "mean", "min", "max", "prod"};
static_assert(sizeof kDtypes / sizeof *kDtypes == kNumDtypes && sizeof kOps / sizeof *kOps == kNumOps);

inline size_t SizeOf(kf_dtype dtype) { return kDtypes[dtype].size; }
inline const char* NameOf(kf_dtype dtype) { return kDtypes[dtype].name; }
inline const char* NameOf(kf_op op) { return kOps[op]; }
inline bool IsFloat(kf_dtype dtype) { return dtype >= KF_FLOAT16; }

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_DTYPE_H_
