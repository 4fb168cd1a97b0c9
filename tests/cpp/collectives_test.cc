// Values: every collective against a straightforward computation, over sizes, counts, dtypes and reductions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "collectives/dtype.h"
#include "collectives/reduce.h"
#include "ranks.h"

namespace kungfu::testing {
namespace {

constexpr size_t kChunkFloats = shm::kBufferBytes / sizeof(float);

// Depends on rank and index, and stays small enough for exact sums and products in float32.
template <typename T>
std::vector<T> Input(uint32_t rank, size_t count) {
  std::vector<T> values(count);
  for (size_t i = 0; i < count; i++) values[i] = static_cast<T>((i * 7 + rank * 13) % 5 + 1);
  return values;
}

template <typename T>
T Expected(kf_op op, uint32_t size, size_t i) {
  // Wide enough for exact results; narrow integers wrap at the end, as they do step by step.
  double sum = 0, product = 1, least = 1e9, most = -1e9;
  for (uint32_t r = 0; r < size; r++) {
    const auto x = static_cast<double>((i * 7 + r * 13) % 5 + 1);
    sum += x;
    product *= x;
    least = std::min(least, x);
    most = std::max(most, x);
  }
  switch (op) {
    case KF_SUM:
      return static_cast<T>(static_cast<int64_t>(sum));
    case KF_MEAN:
      if (std::is_integral_v<T>) return static_cast<T>(static_cast<int64_t>(sum) / size);
      return static_cast<T>(static_cast<T>(sum) / static_cast<T>(size));
    case KF_MIN:
      return static_cast<T>(least);
    case KF_MAX:
      return static_cast<T>(most);
    case KF_PROD:
      return static_cast<T>(static_cast<int64_t>(product));
  }
  return T{};
}

template <typename T>
void CheckAllReduce(Ranks& ranks, kf_dtype dtype, size_t count) {
  for (const kf_op op : {KF_SUM, KF_MEAN, KF_MIN, KF_MAX, KF_PROD}) {
    ranks.Run([&](uint32_t rank, Communicator& communicator) {
      const std::vector<T> input = Input<T>(rank, count);
      std::vector<T> output(count + 1, T{42});
      communicator.Run(Op(Kind::kAllReduce, "values", {{input.data(), output.data(), count}}, dtype, op));
      EXPECT_EQ(output[count], T{42}) << "wrote past the end";
      std::vector<T> in_place = input;
      communicator.Run(Op(Kind::kAllReduce, "in place", {{in_place.data(), in_place.data(), count}}, dtype, op));
      for (size_t i = 0; i < count; i++) {
        ASSERT_EQ(output[i], Expected<T>(op, ranks.size(), i)) << NameOf(op) << " rank " << rank << " index " << i;
        ASSERT_EQ(in_place[i], output[i]);
      }
    });
  }
}

const std::vector<uint32_t> kSizes = {1, 2, 3, 4, 7};

TEST(MismatchText, ParametersThatDifferNameTheMistakeFirst) {
  const std::string begin = "did you forget KungFuElasticCallback (in a loop: ElasticTraining";
  const auto text = [](const char* a, const char* b) {
    return MismatchText("hosts", "g", {{"rank 0", a}, {"rank 1", b}});
  };
  EXPECT_EQ(text("all_reduce on parameters 0a, (3)", "all_reduce on parameters 0b, (3)").rfind(begin, 0), 0u);
  EXPECT_EQ(text("all_reduce on parameters 0a, (3)", "all_reduce on parameters 0a, (4)"),
            "the hosts called different operations with the name \"g\": rank 0: all_reduce on parameters 0a, (3); "
            "rank 1: all_reduce on parameters 0a, (4)");
}

TEST(MismatchText, GatheredLengthsThatDifferNameTheRemedy) {
  const auto names_it = [](const char* a, const char* b) {
    const std::string text = MismatchText("ranks", "g", {{"rank 0", a}, {"rank 1", b}});
    return text.find("comm.all_gather(uneven=True)") != std::string::npos;
  };
  EXPECT_TRUE(names_it("all_gather of 15 float64 (5,3)", "all_gather of 12 float64 (4,3)"));
  EXPECT_FALSE(names_it("all_gather of 15 float64 (5,3)", "all_gather of 15 float64 (3,5)"));
  EXPECT_FALSE(names_it("all_gather of 15 float64 (5,3)", "all_reduce of 12 float64 (4,3), sum"));
  EXPECT_FALSE(names_it("all_gather of 32 uint8 float64(*, 2) in bytes (32,)",
                        "all_gather of 48 uint8 float64(*, 3) in bytes (48,)"));
}

TEST(AllReduce, AgreesWithReferenceForEveryDtype) {
  for (const uint32_t size : kSizes) {
    Ranks ranks(size);
    for (const size_t count : {size_t{0}, size_t{1}, size_t{5}, size_t{41}, size_t{4099}}) {
      CheckAllReduce<int8_t>(ranks, KF_INT8, count);
      CheckAllReduce<uint8_t>(ranks, KF_UINT8, count);
      CheckAllReduce<int16_t>(ranks, KF_INT16, count);
      CheckAllReduce<uint16_t>(ranks, KF_UINT16, count);
      CheckAllReduce<int32_t>(ranks, KF_INT32, count);
      CheckAllReduce<uint32_t>(ranks, KF_UINT32, count);
      CheckAllReduce<int64_t>(ranks, KF_INT64, count);
      CheckAllReduce<uint64_t>(ranks, KF_UINT64, count);
      CheckAllReduce<float>(ranks, KF_FLOAT32, count);
      CheckAllReduce<double>(ranks, KF_FLOAT64, count);
    }
  }
}

TEST(AllReduce, CutsIntoChunksAnywhere) {
  for (const uint32_t size : {2u, 3u}) {
    Ranks ranks(size);
    for (const size_t count : {kChunkFloats - 1, kChunkFloats, kChunkFloats + 1, 9 * kChunkFloats + 3}) {
      CheckAllReduce<float>(ranks, KF_FLOAT32, count);
    }
  }
}

TEST(AllReduce, StreamsLargeResultsToAnyAddress) {
  Ranks ranks(2);
  const size_t count = (8 << 20) / sizeof(float) + 3;
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    const std::vector<float> input = Input<float>(rank, count);
    for (const size_t shift : {0, 1, 5}) {
      std::vector<float> output(count + 16, 42);
      communicator.Run(Op(Kind::kAllReduce, "large", {{input.data(), output.data() + shift, count}}, KF_FLOAT32));
      for (size_t i = 0; i < count; i++) ASSERT_EQ(output[shift + i], Expected<float>(KF_SUM, 2, i)) << i;
      for (size_t i = count + shift; i < output.size(); i++) ASSERT_EQ(output[i], 42) << "wrote past the end";
      if (shift > 0) {
        ASSERT_EQ(output[shift - 1], 42) << "wrote before the beginning";
      }
    }
  });
}

TEST(AllReduce, PacksTensorsOfAnySize) {
  for (const uint32_t size : {1u, 2u, 4u}) {
    Ranks ranks(size);
    ranks.Run([&](uint32_t rank, Communicator& communicator) {
      std::vector<std::vector<float>> inputs, outputs;
      std::vector<kf_tensor> tensors;
      for (const size_t count : {size_t{3}, size_t{0}, 2 * kChunkFloats + 5, size_t{1}, kChunkFloats, size_t{777}}) {
        inputs.push_back(Input<float>(rank + count % 3, count));
        outputs.emplace_back(count);
      }
      for (size_t i = 0; i < inputs.size(); i++) {
        tensors.push_back({inputs[i].data(), outputs[i].data(), inputs[i].size()});
      }
      communicator.Run(Op(Kind::kAllReduce, "packed", tensors, KF_FLOAT32));
      for (const std::vector<float>& output : outputs) {
        std::vector<float> sum(output.size());
        for (uint32_t r = 0; r < size; r++) {
          const std::vector<float> theirs = Input<float>(r + output.size() % 3, output.size());
          for (size_t i = 0; i < sum.size(); i++) sum[i] += theirs[i];
        }
        ASSERT_EQ(output, sum);
      }
    });
  }
}

TEST(Broadcast, BringsTheRootsValuesFromEveryRoot) {
  for (const uint32_t size : kSizes) {
    Ranks ranks(size);
    for (const size_t count : {size_t{0}, size_t{3}, size_t{1000}, 6 * kChunkFloats + 1}) {
      for (uint32_t root = 0; root < size; root++) {
        ranks.Run([&](uint32_t rank, Communicator& communicator) {
          std::vector<float> values = Input<float>(rank, count);
          communicator.Run(
              Op(Kind::kBroadcast, "root", {{values.data(), values.data(), count}}, KF_FLOAT32, KF_SUM, root));
          ASSERT_EQ(values, Input<float>(root, count));
        });
      }
    }
  }
}

TEST(AllGather, StacksInRankOrder) {
  for (const uint32_t size : kSizes) {
    Ranks ranks(size);
    for (const size_t count : {size_t{0}, size_t{2}, size_t{1001}, 5 * kChunkFloats + 7}) {
      ranks.Run([&](uint32_t rank, Communicator& communicator) {
        const std::vector<float> input = Input<float>(rank, count);
        const std::vector<float> second = Input<float>(rank + 1, 3);
        std::vector<float> output(count * size), second_output(3 * size);
        communicator.Run(Op(Kind::kAllGather, "gather",
                            {{input.data(), output.data(), count}, {second.data(), second_output.data(), 3}},
                            KF_FLOAT32));
        for (uint32_t r = 0; r < size; r++) {
          const std::vector<float> theirs = Input<float>(r, count);
          ASSERT_TRUE(std::equal(theirs.begin(), theirs.end(), output.begin() + r * count));
          const std::vector<float> second_theirs = Input<float>(r + 1, 3);
          ASSERT_TRUE(std::equal(second_theirs.begin(), second_theirs.end(), second_output.begin() + r * 3));
        }
      });
    }
  }
}

TEST(ReduceScatter, GivesEachRankItsPart) {
  for (const uint32_t size : kSizes) {
    Ranks ranks(size);
    for (const size_t part : {size_t{0}, size_t{1}, size_t{333}, kChunkFloats + 9}) {
      ranks.Run([&](uint32_t rank, Communicator& communicator) {
        const std::vector<float> input = Input<float>(rank, part * size);
        const std::vector<float> second = Input<float>(rank, 2 * size);
        std::vector<float> output(part), second_output(2);
        communicator.Run(Op(
            Kind::kReduceScatter, "scatter",
            {{input.data(), output.data(), part * size}, {second.data(), second_output.data(), 2 * size}}, KF_FLOAT32));
        for (size_t i = 0; i < part; i++) ASSERT_EQ(output[i], Expected<float>(KF_SUM, size, rank * part + i));
        for (size_t i = 0; i < 2; i++) ASSERT_EQ(second_output[i], Expected<float>(KF_SUM, size, rank * 2 + i));
      });
    }
  }
}

TEST(ReduceScatter, RefusesWhatDoesNotDivide) {
  Ranks ranks(2);
  float x[3] = {}, y[3] = {};
  try {
    ranks.at(0).Run(Op(Kind::kReduceScatter, "odd", {{x, y, 3}}, KF_FLOAT32));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), KF_INVALID);
    EXPECT_STREQ(error.what(), "reduce_scatter \"odd\": 3 elements can't be scattered evenly over 2 ranks");
  }
}

// ---- 16-bit floats and special values, straight at the reductions ----

float FromHalf(uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const double mantissa = half & 1023;
  const double magnitude = exponent == 31  ? (mantissa != 0 ? NAN : INFINITY)
                           : exponent == 0 ? std::ldexp(mantissa, -24)
                                           : std::ldexp(mantissa + 1024, exponent - 25);
  return static_cast<float>((half & 0x8000) != 0 ? -magnitude : magnitude);
}

uint16_t NearestHalf(double x) {
  // By search over all finite halves: slow and obviously right. Ties go to the even mantissa.
  uint16_t best = 0;
  double best_distance = INFINITY;
  for (uint32_t h = 0; h < 0x7c00; h++) {
    const double distance = std::fabs(std::fabs(x) - FromHalf(static_cast<uint16_t>(h)));
    if (distance < best_distance || (distance == best_distance && h % 2 == 0)) {
      best_distance = distance;
      best = static_cast<uint16_t>(h);
    }
  }
  if (std::fabs(x) >= 65520) best = 0x7c00;
  return static_cast<uint16_t>(best | (std::signbit(x) ? 0x8000 : 0));
}

TEST(Half, EveryValueSurvivesAReductionWithZero) {
  std::vector<uint16_t> all(1 << 16), zero(1 << 16, 0x8000), out(1 << 16);
  std::iota(all.begin(), all.end(), 0);
  const void* sources[] = {all.data(), zero.data()};
  ReductionFor(KF_FLOAT16, KF_SUM)(out.data(), sources, 2, all.size());
  for (size_t i = 0; i < all.size(); i++) {
    const float x = FromHalf(all[i]);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(FromHalf(out[i]))) << i;
    } else if (x == 0) {
      ASSERT_EQ(out[i] & 0x7fff, 0);
    } else {
      ASSERT_EQ(out[i], all[i]);
    }
  }
}

TEST(Half, AccumulatesInFloat32AndRoundsOnceToNearestEven) {
  std::mt19937 random(1);
  for (int i = 0; i < 300; i++) {
    uint16_t values[3], out;
    for (uint16_t& v : values) v = static_cast<uint16_t>(random() % 0x7000 | (random() % 2) << 15);
    const void* sources[] = {&values[0], &values[1], &values[2]};
    ReductionFor(KF_FLOAT16, KF_SUM)(&out, sources, 3, 1);
    const float sum = (FromHalf(values[0]) + FromHalf(values[1])) + FromHalf(values[2]);
    ASSERT_EQ(out & (sum == 0 ? 0x7fff : 0xffff), NearestHalf(sum)) << sum;
  }
  // 2048 + 1 + 1: in float16 arithmetic each 1 would be lost.
  const uint16_t big = 0x6800, one = 0x3c00;
  const void* sources[] = {&big, &one, &one};
  uint16_t out;
  ReductionFor(KF_FLOAT16, KF_SUM)(&out, sources, 3, 1);
  EXPECT_EQ(FromHalf(out), 2050);
}

TEST(BFloat, AccumulatesInFloat32AndRoundsOnceToNearestEven) {
  const auto to_bfloat = [](float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(bits >> 16);
  };
  const uint16_t a = to_bfloat(256), one = to_bfloat(1), nan = 0x7fc0, inf = 0x7f80;
  uint16_t out;
  const void* sources[] = {&a, &one, &one};
  ReductionFor(KF_BFLOAT16, KF_SUM)(&out, sources, 3, 1);
  EXPECT_EQ(out, to_bfloat(258));
  const void* tie[] = {&a, &one};  // 257 lies between 256 and 258: to even
  ReductionFor(KF_BFLOAT16, KF_SUM)(&out, tie, 2, 1);
  EXPECT_EQ(out, to_bfloat(256));
  const void* with_nan[] = {&a, &nan};
  ReductionFor(KF_BFLOAT16, KF_SUM)(&out, with_nan, 2, 1);
  EXPECT_EQ(out & 0x7fff, 0x7fc0);
  const void* with_inf[] = {&a, &inf};
  ReductionFor(KF_BFLOAT16, KF_MAX)(&out, with_inf, 2, 1);
  EXPECT_EQ(out, inf);
}

TEST(Reduction, MinimumAndMaximumPropagateNaN) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float left[] = {nan, 1, 2}, right[] = {1, nan, 3};
  for (const kf_op op : {KF_MIN, KF_MAX}) {
    float out[3];
    const void* sources[] = {left, right};
    ReductionFor(KF_FLOAT32, op)(out, sources, 2, 3);
    EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1]));
    EXPECT_EQ(out[2], op == KF_MIN ? 2 : 3);
  }
}

TEST(Reduction, IntegerMeanTruncatesAndDoesNotOverflow) {
  const int8_t a[] = {127, -128, -3}, b[] = {127, -128, 0};
  int8_t out[3];
  const void* sources[] = {a, b};
  ReductionFor(KF_INT8, KF_MEAN)(out, sources, 2, 3);
  EXPECT_EQ(out[0], 127);
  EXPECT_EQ(out[1], -128);
  EXPECT_EQ(out[2], -1);
}

TEST(Reduction, BitsDoNotDependOnTheCut) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> inputs(5, std::vector<float>(3001));
  for (auto& input : inputs) {
    for (float& x : input) x = normal(random);
  }
  std::vector<float> whole(3001), pieces(3001);
  const void* sources[5];
  for (int r = 0; r < 5; r++) sources[r] = inputs[r].data();
  ReductionFor(KF_FLOAT32, KF_MEAN)(whole.data(), sources, 5, whole.size());
  for (size_t at = 0; at < pieces.size();) {
    const size_t n = std::min<size_t>(pieces.size() - at, random() % 100);
    for (int r = 0; r < 5; r++) sources[r] = inputs[r].data() + at;
    ReductionFor(KF_FLOAT32, KF_MEAN)(pieces.data() + at, sources, 5, n);
    at += n;
  }
  EXPECT_EQ(std::memcmp(whole.data(), pieces.data(), whole.size() * 4), 0);
}

}  // namespace
}  // namespace kungfu::testing
