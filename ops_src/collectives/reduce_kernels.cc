// This file is compiled once for each instruction set. KUNGFU_ISA is the namespace. The file
// includes only freestanding headers, and no other header with inline functions. Otherwise the
// linker could keep an inline function that was compiled with AVX flags, and use it in the whole
// library.
//
// The compiler can vectorize all loops in this file. -fwrapv makes integer overflow wrap around.
// -ffp-contract=off keeps the results bit-identical on every instruction set.
#include <stddef.h>
#include <stdint.h>

#include "collectives/reduce_table.h"

namespace kungfu {
namespace KUNGFU_ISA {
namespace {

// ---- storage and accumulation of an element ----

template <typename T>
struct Plain {
  using Stored = T;
  using Acc = T;
  static Acc Load(T x) { return x; }
  static T Store(Acc x) { return x; }
};

template <typename T, typename Wide>
struct Widened {
  using Stored = T;
  using Acc = Wide;
  static Acc Load(T x) { return static_cast<Wide>(x); }
  static T Store(Acc x) { return static_cast<T>(x); }
};

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

struct Half {
  using Stored = uint16_t;
  using Acc = float;
  // Shifts exponent and mantissa into place, then corrects the exponent's bias by a multiplication.
  // The multiplication turns subnormal float16 numbers into normal float32 numbers. The result is
  // exact for every finite value.
  static float Load(uint16_t half) {
    const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t finite = BitsOf(FloatOf(magnitude) * FloatOf(0x77800000u));  // times 2^112
    const uint32_t special = magnitude | 0x7f800000u;
    return FloatOf(sign | ((half & 0x7c00u) == 0x7c00u ? special : finite));
  }
  // Rounds to nearest even. A float16 number below 2^-14 is subnormal, with a unit of 2^-24. The
  // unit in the last place of 0.5 in float32 is also 2^-24. So adding 0.5 makes the floating-point
  // adder round subnormal numbers.
  static uint16_t Store(float x) {
    const uint32_t bits = BitsOf(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t subnormal = BitsOf(FloatOf(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t rounded = magnitude >= 0x47800000u ? special : finite;
    return static_cast<uint16_t>(rounded | ((bits >> 16) & 0x8000u));
  }
};

struct BFloat {
  using Stored = uint16_t;
  using Acc = float;
  static float Load(uint16_t x) { return FloatOf(static_cast<uint32_t>(x) << 16); }
  static uint16_t Store(float x) {
    const uint32_t bits = BitsOf(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40u;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
};

// ---- the operations ----

template <typename A>
struct AsItIs {
  static A Finish(A a, A) { return a; }
};

template <typename A>
struct Sum : AsItIs<A> {
  static A Apply(A a, A b) { return a + b; }
};

template <typename A>
struct Mean : Sum<A> {
  static A Finish(A a, A n) { return a / n; }
};

template <typename A>
struct Prod : AsItIs<A> {
  static A Apply(A a, A b) { return a * b; }
};

template <typename A>
struct Min : AsItIs<A> {
  static A Apply(A a, A b) { return (a < b || a != a) ? a : b; }
};

template <typename A>
struct Max : AsItIs<A> {
  static A Apply(A a, A b) { return (a > b || a != a) ? a : b; }
};

// ---- the loops ----

template <typename Format, template <typename> typename Operation>
void Reduce(void* out, const void* const* sources, unsigned n, size_t count) {
  using T = typename Format::Stored;
  using A = typename Format::Acc;
  using Op = Operation<A>;
  T* const y = static_cast<T*>(out);
  const T* const first = static_cast<const T*>(sources[0]);
  const A ranks = static_cast<A>(n);
  if (n == 2) {
    const T* const second = static_cast<const T*>(sources[1]);
    // `out` may be the same memory as `first` or `second`. Even then, each iteration is independent
    // of the others.
#pragma GCC ivdep
    for (size_t i = 0; i < count; i++) {
      y[i] = Format::Store(Op::Finish(Op::Apply(Format::Load(first[i]), Format::Load(second[i])), ranks));
    }
    return;
  }
  // For more than two ranks, the loop works block by block, so that the accumulators stay in the
  // first-level cache.
  constexpr size_t kBlock = 4096 / sizeof(A);
  alignas(64) A acc[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t block = count - begin < kBlock ? count - begin : kBlock;
    for (size_t i = 0; i < block; i++) acc[i] = Format::Load(first[begin + i]);
    for (unsigned r = 1; r < n; r++) {
      const T* const source = static_cast<const T*>(sources[r]) + begin;
      for (size_t i = 0; i < block; i++) acc[i] = Op::Apply(acc[i], Format::Load(source[i]));
    }
    for (size_t i = 0; i < block; i++) y[begin + i] = Format::Store(Op::Finish(acc[i], ranks));
  }
}

template <typename Format>
void Blend(void* out, const void* const* sources, const double* shares, unsigned n, size_t count) {
  using T = typename Format::Stored;
  using A = typename Format::Acc;
  T* const y = static_cast<T*>(out);
  constexpr size_t kBlock = 4096 / sizeof(A);
  alignas(64) A acc[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t block = count - begin < kBlock ? count - begin : kBlock;
    for (unsigned r = 0; r < n; r++) {
      const T* const source = static_cast<const T*>(sources[r]) + begin;
      const A share = static_cast<A>(shares[r]);
      if (r == 0) {
        for (size_t i = 0; i < block; i++) acc[i] = Format::Load(source[i]) * share;
      } else {
        for (size_t i = 0; i < block; i++) acc[i] += Format::Load(source[i]) * share;
      }
    }
    for (size_t i = 0; i < block; i++) y[begin + i] = Format::Store(acc[i]);
  }
}

template <typename Format>
void Divide(void* out, const void* in, double divisor, size_t count) {
  using T = typename Format::Stored;
  using A = typename Format::Acc;
  T* const y = static_cast<T*>(out);
  const T* const x = static_cast<const T*>(in);
  const A by = static_cast<A>(divisor);
#pragma GCC ivdep
  for (size_t i = 0; i < count; i++) y[i] = Format::Store(Format::Load(x[i]) / by);
}

}  // namespace

__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 Uint128;
#define KUNGFU_ROW(format, ...) \
  {Reduce<format, Sum>, Reduce<__VA_ARGS__, Mean>, Reduce<format, Min>, Reduce<format, Max>, Reduce<format, Prod>}

// Rows are in the order of kf_dtype, and columns in the order of kf_op. Means accumulate in a
// different type.
extern const ReduceTable kTable;
const ReduceTable kTable = {
    {
        KUNGFU_ROW(Plain<int8_t>, Widened<int8_t, int64_t>),
        KUNGFU_ROW(Plain<uint8_t>, Widened<uint8_t, uint64_t>),
        KUNGFU_ROW(Plain<int16_t>, Widened<int16_t, int64_t>),
        KUNGFU_ROW(Plain<uint16_t>, Widened<uint16_t, uint64_t>),
        KUNGFU_ROW(Plain<int32_t>, Widened<int32_t, int64_t>),
        KUNGFU_ROW(Plain<uint32_t>, Widened<uint32_t, uint64_t>),
        KUNGFU_ROW(Plain<int64_t>, Widened<int64_t, Int128>),
        KUNGFU_ROW(Plain<uint64_t>, Widened<uint64_t, Uint128>),
        KUNGFU_ROW(Half, Half),
        KUNGFU_ROW(BFloat, BFloat),
        KUNGFU_ROW(Plain<float>, Plain<float>),
        KUNGFU_ROW(Plain<double>, Plain<double>),
    },
    {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, Blend<Half>, Blend<BFloat>,
     Blend<Plain<float>>, Blend<Plain<double>>},
    {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, Divide<Half>, Divide<BFloat>,
     Divide<Plain<float>>, Divide<Plain<double>>},
};

}  // namespace KUNGFU_ISA
}  // namespace kungfu
