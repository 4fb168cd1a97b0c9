// Element-wise reduction of what several ranks brought, vectorised for the processor that it runs on.
#ifndef KUNGFU_COLLECTIVES_REDUCE_H_
#define KUNGFU_COLLECTIVES_REDUCE_H_

#include <cstddef>

#include "kungfu/c_api.h"

namespace kungfu {

// out[i] = sources[0][i] op sources[1][i] op ... op sources[n-1][i], evaluated from left to right, n >= 1.
// The bits are a function of the inputs and of n alone: not of the processor, the alignment or the cut into calls.
// 16-bit floats accumulate in float32 and are rounded once. A mean of integers accumulates in more bits than they
// have, so that it never overflows, and truncates towards zero; their sums and products wrap in their own width, as
// arithmetic of NumPy's arrays does. Minimum and maximum propagate NaN, as NumPy's do.
// `out` may be one of the sources; other overlaps are not allowed.
using ReduceFn = void (*)(void* out, const void* const* sources, unsigned n, size_t count);

ReduceFn ReductionFor(kf_dtype dtype, kf_op op);

// out[i] = sources[0][i] * shares[0] + sources[1][i] * shares[1] + ..., otherwise the same. For float dtypes, null for
// others.
using BlendFn = void (*)(void* out, const void* const* sources, const double* shares, unsigned n, size_t count);

BlendFn BlendFor(kf_dtype dtype);

// out[i] = in[i] / divisor, which is rounded to what the dtype accumulates in before. For float dtypes, null for
// others.
using DivideFn = void (*)(void* out, const void* in, double divisor, size_t count);

DivideFn DivisionFor(kf_dtype dtype);

// The instruction set that ReductionFor chose: "avx512", "avx2" or "baseline".
const char* ReductionInstructionSet();

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_REDUCE_H_
