// Names and sizes of the element types and reductions of the C ABI.
#ifndef KUNGFU_COLLECTIVES_DTYPE_H_
#define KUNGFU_COLLECTIVES_DTYPE_H_

#include <cstddef>

#include "kungfu/c_api.h"

namespace kungfu {

inline constexpr int kNumDtypes = KF_FLOAT64 + 1;
inline constexpr int kNumOps = KF_PROD + 1;

inline bool IsDtype(kf_dtype dtype) { return dtype >= KF_INT8 && dtype <= KF_FLOAT64; }
inline bool IsOp(kf_op op) { return op >= KF_SUM && op <= KF_PROD; }

inline size_t SizeOf(kf_dtype dtype) {
  switch (dtype) {
    case KF_INT8:
    case KF_UINT8:
      return 1;
    case KF_INT16:
    case KF_UINT16:
    case KF_FLOAT16:
    case KF_BFLOAT16:
      return 2;
    case KF_INT32:
    case KF_UINT32:
    case KF_FLOAT32:
      return 4;
    case KF_INT64:
    case KF_UINT64:
    case KF_FLOAT64:
      return 8;
  }
  return 0;
}

inline const char* NameOf(kf_dtype dtype) {
  switch (dtype) {
    case KF_INT8:
      return "int8";
    case KF_UINT8:
      return "uint8";
    case KF_INT16:
      return "int16";
    case KF_UINT16:
      return "uint16";
    case KF_INT32:
      return "int32";
    case KF_UINT32:
      return "uint32";
    case KF_INT64:
      return "int64";
    case KF_UINT64:
      return "uint64";
    case KF_FLOAT16:
      return "float16";
    case KF_BFLOAT16:
      return "bfloat16";
    case KF_FLOAT32:
      return "float32";
    case KF_FLOAT64:
      return "float64";
  }
  return "?";
}

inline const char* NameOf(kf_op op) {
  switch (op) {
    case KF_SUM:
      return "sum";
    case KF_MEAN:
      return "mean";
    case KF_MIN:
      return "min";
    case KF_MAX:
      return "max";
    case KF_PROD:
      return "prod";
  }
  return "?";
}

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_DTYPE_H_
