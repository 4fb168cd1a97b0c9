// Element-wise reduction of the contributions of several ranks, vectorized for the processor on
// which it runs.
#ifndef KUNGFU_COLLECTIVES_REDUCE_H_
#define KUNGFU_COLLECTIVES_REDUCE_H_

#include <cstddef>

#include "kungfu/c_api.h"

namespace kungfu {

// Computes out[i] = sources[0][i] op sources[1][i] op ... op sources[n-1][i] from left to right,
// for n >= 1. The bits of the result depend only on the inputs and on n. They don't depend on the
// processor, on the alignment, or on how the elements are divided into calls.
// - 16-bit floats accumulate in float32 and are rounded once.
// - A mean of integers accumulates in a wider type, so that it never overflows. It truncates towards zero.
// - Sums and products of integers wrap in their own width, as in NumPy.
// - Minimum and maximum propagate NaN, as in NumPy.
// `out` may be one of the sources. Other overlaps are not allowed.
using ReduceFn = void (*)(void* out, const void* const* sources, unsigned n, size_t count);

ReduceFn ReductionFor(kf_dtype dtype, kf_op op);

// Computes out[i] = sources[0][i] * shares[0] + sources[1][i] * shares[1] + ... by the rules of
// ReduceFn. BlendFor returns null for dtypes that aren't floats.
using BlendFn = void (*)(void* out, const void* const* sources, const double* shares, unsigned n, size_t count);

BlendFn BlendFor(kf_dtype dtype);

// Computes out[i] = in[i] / divisor. The divisor is first rounded to the dtype's accumulation type.
// DivisionFor returns null for dtypes that aren't floats.
using DivideFn = void (*)(void* out, const void* in, double divisor, size_t count);

DivideFn DivisionFor(kf_dtype dtype);

// Returns the instruction set that ReductionFor chose: "avx512", "avx2" or "baseline".
const char* ReductionInstructionSet();

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_REDUCE_H_
