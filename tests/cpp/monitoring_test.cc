// What is counted of the collectives, and the norms of gradients.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "collectives/lone_communicator.h"
#include "collectives/traffic.h"
#include "monitoring/gradient_norms.h"
#include "ranks.h"
#include "runtime/background.h"

namespace kungfu::testing {
namespace {

using monitoring::GradientNorms;
using monitoring::Norms;

// The counters are the process's, and so those of all ranks here together.
class Counted {
 public:
  uint64_t operations() const { return now().operations - before_.operations; }
  uint64_t brought() const { return now().brought_bytes - before_.brought_bytes; }
  uint64_t from_each() const { return now().received_from_each - before_.received_from_each; }
  uint64_t from(uint32_t rank) const { return now().received_from_root[rank] - before_.received_from_root[rank]; }
  double busy_s() const { return now().busy_s - before_.busy_s; }
  double exposed_s() const { return now().exposed_s - before_.exposed_s; }

 private:
  static TrafficTotals now() { return Traffic::Get().Read(); }
  const TrafficTotals before_ = now();
};

void AllReduce(Communicator& communicator, const char* name, std::vector<float>& values, kf_op op = KF_SUM) {
  const std::vector<kf_tensor> tensors = {{values.data(), values.data(), values.size()}};
  communicator.Run(Op(Kind::kAllReduce, name, tensors, KF_FLOAT32, op));
}

TEST(TrafficTest, BytesAreThoseThatRanksReadFromEachOther) {
  for (const size_t count : {size_t{5}, size_t{1000}, size_t{300000}, size_t{1 << 20}}) {
    Ranks ranks(2);
    const Counted counted;
    ranks.Run([&](uint32_t, Communicator& communicator) {
      std::vector<float> values(count, 1.0f);
      AllReduce(communicator, "x", values);
    });
    EXPECT_EQ(counted.operations(), 2u);
    EXPECT_EQ(counted.brought(), 2 * count * sizeof(float));
    EXPECT_EQ(counted.from_each(), 2 * count * sizeof(float)) << count;
  }
}

TEST(TrafficTest, SplitReductionReadsAPartFromEachAndCopiesAPartFromEach) {
  Ranks ranks(4, {std::chrono::seconds(60), std::chrono::seconds(60)}, /*cores=*/4);
  const size_t count = 1 << 20;
  const Counted counted;
  ranks.Run([&](uint32_t, Communicator& communicator) {
    std::vector<float> values(count, 1.0f);
    AllReduce(communicator, "x", values);
  });
  EXPECT_EQ(counted.from_each(), 4 * (2 * count * sizeof(float) / 4));
}

TEST(TrafficTest, BroadcastIsReadFromItsRoot) {
  Ranks ranks(3);
  const Counted counted;
  ranks.Run([&](uint32_t, Communicator& communicator) {
    std::vector<float> values(100, 1.0f);
    const std::vector<kf_tensor> tensors = {{values.data(), values.data(), values.size()}};
    communicator.Run(Op(Kind::kBroadcast, "x", tensors, KF_FLOAT32, KF_SUM, /*root=*/1));
  });
  EXPECT_EQ(counted.brought(), 400u);
  EXPECT_EQ(counted.from(1), 2 * 400u);
  EXPECT_EQ(counted.from_each(), 0u);
}

TEST(TrafficTest, AnOperationAloneIsNotCounted) {
  LoneCommunicator alone;
  const Counted counted;
  std::vector<float> values(100, 1.0f);
  AllReduce(alone, "x", values);
  EXPECT_EQ(counted.operations(), 0u);
}

TEST(TrafficTest, WaitingForAnotherRankIsTimeInCommunication) {
  using namespace std::chrono_literals;
  Ranks ranks(2);
  const Counted counted;
  std::atomic<bool> other_is_there{false};
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    std::vector<float> values(10, 1.0f);
    if (rank == 0) other_is_there = true;
    while (!other_is_there) std::this_thread::sleep_for(1ms);
    if (rank == 1) std::this_thread::sleep_for(100ms);
    AllReduce(communicator, "x", values);
  });
  EXPECT_GE(counted.busy_s(), 0.08);
  EXPECT_NEAR(counted.exposed_s(), counted.busy_s(), 1e-3);
}

TEST(TrafficTest, BackgroundTimeIsHiddenWhileNoCallerWaits) {
  using namespace std::chrono_literals;
  Ranks ranks(2);
  const Counted counted;
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    std::vector<float> values(1000, 1.0f), results(1000);
    if (rank == 1) std::this_thread::sleep_for(200ms);  // which rank 0 waits for in the background
    Background background;
    const std::vector<kf_tensor> tensors = {{values.data(), results.data(), values.size()}};
    const std::shared_ptr<Communicator> borrowed(&communicator, [](Communicator*) {});
    const kf_started started = {background.Start(borrowed, Op(Kind::kAllReduce, "x", tensors, KF_FLOAT32)),
                                tensors.data(), tensors.size()};
    if (rank == 0) std::this_thread::sleep_for(400ms);  // the backward pass
    background.Wait(&started, 1);
  });
  EXPECT_GE(counted.busy_s(), 0.15);
  EXPECT_LE(counted.exposed_s(), counted.busy_s() / 2);
}

// Against what it is made of, on this machine and in this moment: a processor that is slow, or shared, is so for both.
TEST(TrafficTime, CountingCostsWhatItsAdditionsCost) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers take their own time";
#endif
  constexpr int kCalls = 2000;
  static std::atomic<uint64_t> sums[4];
  const auto best_of = [best = 1e9](const auto& call) mutable {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; i++) call();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    return best = std::min(best, took.count() / kCalls);
  };
  auto counting = best_of, additions = best_of;
  double counting_ns = 0, additions_ns = 0;
  for (int round = 0; round < 100; round++) {
    counting_ns = counting([] { Traffic::Get().Count(Ticks(), 8, 8); });
    additions_ns = additions([] {
      const uint64_t began = Ticks();
      sums[0].fetch_add(Ticks() - began, std::memory_order_relaxed);
      for (int i = 1; i < 4; i++) sums[i].fetch_add(8, std::memory_order_relaxed);
    });
  }
  RecordProperty("nanoseconds", std::to_string(counting_ns));
  EXPECT_LT(counting_ns, 1.5 * additions_ns);  // a slower clock, or a system call, takes as much again
}

TEST(GradientNormsTest, OfWhatIsBroughtAndOfTheMean) {
  for (const kf_op op : {KF_SUM, KF_MEAN}) {
    Ranks ranks(3);
    GradientNorms::Get().Watch("gradients");
    ranks.Run([&](uint32_t rank, Communicator& communicator) {
      std::vector<float> values(5000);
      for (size_t i = 0; i < values.size(); i++) values[i] = float(rank + 1) * (i % 2 == 0 ? 1.0f : -1.0f);
      AllReduce(communicator, "gradients/0", values, op);
      AllReduce(communicator, "others", values, op);
    });
    const Norms norms = GradientNorms::Get().Take();
    GradientNorms::Get().Watch("");
    // The ranks are threads of one process here, so this is the sum over them.
    EXPECT_DOUBLE_EQ(norms.brought, 5000.0 * (1 + 4 + 9));
    EXPECT_DOUBLE_EQ(norms.reduced, 3 * 5000.0 * 4);
    EXPECT_EQ(norms.elements, 15000u);
  }
}

TEST(GradientNormsTest, OfSixteenBitFloats) {
  // 1, -2, 0.5, the smallest subnormal and the largest finite one; infinity.
  const uint16_t half[] = {0x3c00, 0xc000, 0x3800, 0x0001, 0x7bff};
  EXPECT_DOUBLE_EQ(monitoring::SquaredNorm(half, 3, KF_FLOAT16), 5.25);
  EXPECT_DOUBLE_EQ(monitoring::SquaredNorm(half + 3, 1, KF_FLOAT16), std::ldexp(1.0, -48));
  EXPECT_DOUBLE_EQ(monitoring::SquaredNorm(half + 4, 1, KF_FLOAT16), 65504.0 * 65504.0);
  const uint16_t infinite = 0x7c00, bfloat[] = {0x3f80, 0xc040};
  EXPECT_TRUE(std::isinf(monitoring::SquaredNorm(&infinite, 1, KF_FLOAT16)));
  EXPECT_DOUBLE_EQ(monitoring::SquaredNorm(bfloat, 2, KF_BFLOAT16), 10.0);
}

}  // namespace
}  // namespace kungfu::testing
