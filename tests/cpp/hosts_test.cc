// Operations between hosts: values and bits, side by side, in groups, and when a host is lost.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "collectives/dtype.h"
#include "collectives/hosts/algorithm.h"
#include "collectives/hosts/copies.h"
#include "collectives/hosts/meter.h"
#include "collectives/hosts/selector.h"
#include "hosts.h"
#include "killed_ranks.h"

namespace kungfu::testing {
namespace {

using hosts::Shape;
using hosts::Strategy;
using tcp::Mesh;
using tcp::Tag;

constexpr Strategy kStrategies[] = {Strategy::kAuto,      Strategy::kRing,       Strategy::kStar,
                                    Strategy::kMultiStar, Strategy::kBinaryTree, Strategy::kMultiBinaryTree};

hosts::Group Everyone(Mesh& mesh, uint64_t epoch = kEpoch) {
  Members members(mesh.size());
  for (uint32_t h = 0; h < mesh.size(); h++) members[h] = h;
  return hosts::Group(mesh, epoch, members);
}

// 1 or 2, depending on host and index: sums and products of five are exact in all dtypes.
int Value(uint32_t host, size_t i) { return 1 + static_cast<int>((i * 7 + i / 5 + host * 3) % 5 % 2); }

int Expected(kf_op op, uint32_t hosts, size_t i) {
  int sum = 0, product = 1, least = 2, most = 1;
  for (uint32_t h = 0; h < hosts; h++) {
    const int x = Value(h, i);
    sum += x;
    product *= x;
    least = std::min(least, x);
    most = std::max(most, x);
  }
  switch (op) {
    case KF_SUM:
      return sum;
    case KF_MIN:
      return least;
    case KF_MAX:
      return most;
    case KF_PROD:
      return product;
    case KF_MEAN:
      break;
  }
  return -1;
}

std::vector<hosts::Figures> Measured(uint32_t hosts, uint32_t step_ns, uint32_t byte_ps) {
  return std::vector<hosts::Figures>(hosts, hosts::Figures{step_ns, byte_ps, 0, 0});
}

// The algorithm that AUTO selects.
std::string Selected(const std::vector<hosts::Figures>& measured, uint64_t bytes, uint32_t beside = 1) {
  return hosts::SelectAlgorithm(Strategy::kAuto, measured, bytes, beside)->name();
}

// The bytes from which on AUTO takes no doubling.
size_t RingFrom(const std::vector<hosts::Figures>& measured, uint32_t beside = 1) {
  size_t below = 0, from = size_t{1} << 40;
  while (from - below > 1) {
    const size_t middle = (below + from) / 2;
    const bool doubles = Selected(measured, middle, beside) == "doubling";
    (doubles ? below : from) = middle;
  }
  return from;
}

// Writes a small positive integer as an element.
void Store(kf_dtype dtype, int value, char* at) {
  const auto put = [at](auto x) { std::memcpy(at, &x, sizeof x); };
  const auto real = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &real, sizeof bits);
  switch (dtype) {
    case KF_INT8:
    case KF_UINT8:
      return put(static_cast<int8_t>(value));
    case KF_INT16:
    case KF_UINT16:
      return put(static_cast<int16_t>(value));
    case KF_INT32:
    case KF_UINT32:
      return put(static_cast<int32_t>(value));
    case KF_INT64:
    case KF_UINT64:
      return put(static_cast<int64_t>(value));
    case KF_FLOAT16:  // the exponent's bias is 15 instead of 127, and 13 bits of the fraction are 0
      return put(static_cast<uint16_t>((bits >> 13) - ((127 - 15) << 10)));
    case KF_BFLOAT16:
      return put(static_cast<uint16_t>(bits >> 16));
    case KF_FLOAT32:
      return put(real);
    case KF_FLOAT64:
      return put(static_cast<double>(value));
  }
}

void CheckAllReduce(Hosts& hosts, uint64_t sequence, kf_dtype dtype, kf_op op, size_t count,
                    Strategy strategy = Strategy::kAuto) {
  const size_t size = SizeOf(dtype);
  std::vector<char> expected(count * size);
  for (size_t i = 0; i < count; i++) Store(dtype, Expected(op, hosts.size(), i), expected.data() + i * size);
  hosts.Run([&](uint32_t self, Mesh& mesh) {
    const hosts::Group group = Everyone(mesh);
    std::vector<char> input(count * size), output(count * size + 1, 42);
    for (size_t i = 0; i < count; i++) Store(dtype, Value(self, i), input.data() + i * size);
    const std::vector<char> before = input;
    AllReduce(group, Tag::Of("values", 2 * sequence), strategy, dtype, op, input.data(), output.data(), count);
    EXPECT_EQ(input == before, true);
    EXPECT_EQ(output.back(), 42) << "wrote past the end";
    output.pop_back();
    EXPECT_EQ(output == expected, true) << NameOf(dtype) << " " << NameOf(op) << " of " << count << " by strategy "
                                        << static_cast<int>(strategy) << " at host " << self << " of " << hosts.size();
    AllReduce(group, Tag::Of("values", 2 * sequence + 1), strategy, dtype, op, input.data(), input.data(), count);
    EXPECT_EQ(input == expected, true) << "in place, at host " << self << " of " << hosts.size();
  });
}

TEST(HostsAllReduce, AgreesWithAPlainSumForEveryDtypeAndReduction) {
  for (uint32_t n = 1; n <= 5; n++) {
    Hosts hosts(n);
    uint64_t sequence = 0;
    for (int dtype = 0; dtype < kNumDtypes; dtype++) {
      for (const kf_op op : {KF_SUM, KF_MIN, KF_MAX, KF_PROD}) {
        for (const size_t bytes : {size_t{8}, size_t{1000}, size_t{131096}}) {
          CheckAllReduce(hosts, sequence++, kf_dtype(dtype), op, bytes / SizeOf(kf_dtype(dtype)));
        }
      }
    }
  }
}

TEST(HostsAllReduce, AgreesForEverySize) {
  const size_t piece = hosts::kPieceBytes / 4;
  for (uint32_t n = 2; n <= 5; n++) {
    Hosts hosts(n, n == 3 ? 1 : 3);
    const size_t edge = RingFrom(Measured(n, 0, 0)) / 4;
    uint64_t sequence = 0;
    for (const size_t count : {size_t{0}, size_t{1}, size_t{2}, size_t{3}, size_t{8191}, size_t{8193}, edge - 1, edge,
                               edge + 1, n * piece - 1, n * piece, n * piece + 1, n * piece * 2 + n, size_t{1234567},
                               (size_t{32} << 20) / 4 / kSlower}) {
      CheckAllReduce(hosts, sequence++, KF_FLOAT32, KF_SUM, count);
    }
  }
}

TEST(HostsAllReduce, AgreesByEveryStrategy) {
  const size_t piece = hosts::kPieceBytes / 4;
  for (const uint32_t n : {1U, 2U, 3U, 4U, 7U}) {
    Hosts hosts(n);
    uint64_t sequence = 0;
    for (const Strategy strategy : kStrategies) {
      for (const size_t count : {size_t{0}, size_t{1}, size_t{5}, size_t{8193}, piece + 1, 3 * piece + 7}) {
        CheckAllReduce(hosts, sequence++, KF_FLOAT32, KF_SUM, count, strategy);
      }
    }
  }
}

// Which host sends to which, and how much: in units of the whole, but for headers and what a small message costs.
TEST(HostsAllReduce, SendsWhatTheAlgorithmOfItsStrategySays) {
  constexpr size_t kCount = 1 << 18;
  constexpr double kWhole = kCount * sizeof(float);
  // Of 4 hosts: [from][to].
  using Sent = std::array<std::array<double, 4>, 4>;
  const std::pair<Strategy, Sent> of_strategies[] = {
      {Strategy::kRing, {{{0, 1.5, 0, 0}, {0, 0, 1.5, 0}, {0, 0, 0, 1.5}, {1.5, 0, 0, 0}}}},
      {Strategy::kStar, {{{0, 1, 1, 1}, {1, 0, 0, 0}, {1, 0, 0, 0}, {1, 0, 0, 0}}}},
      {Strategy::kMultiStar, {{{0, .5, .5, .5}, {.5, 0, .5, .5}, {.5, .5, 0, .5}, {.5, .5, .5, 0}}}},
      {Strategy::kBinaryTree, {{{0, 1, 1, 0}, {1, 0, 0, 1}, {1, 0, 0, 0}, {0, 1, 0, 0}}}},
      // Tree r has the edges r to r+1, r to r+2, and r+1 to r+3.
      {Strategy::kMultiBinaryTree, {{{0, .25, 1, .25}, {.25, 0, .25, 1}, {1, .25, 0, .25}, {.25, 1, .25, 0}}}}};
  for (const auto& [strategy, expected] : of_strategies) {
    Hosts hosts(4);
    hosts.Run([&, by = strategy](uint32_t, Mesh& mesh) {
      std::vector<float> x(kCount, 1);
      AllReduce(Everyone(mesh), Tag::Of("by", 0), by, KF_FLOAT32, KF_SUM, x.data(), x.data(), kCount);
    });
    for (uint32_t from = 0; from < 4; from++) {
      for (uint32_t to = 0; to < 4; to++) {
        EXPECT_NEAR(static_cast<double>(hosts.at(from).Counted(to).sent) / kWhole, expected[from][to], 0.01)
            << "strategy " << static_cast<int>(strategy) << " from " << from << " to " << to;
      }
    }
  }
}

TEST(HostsStrategies, EachTreeReachesEveryHostOnce) {
  for (const Shape shape : {Shape::kChain, Shape::kStar, Shape::kBinary, Shape::kBinomial}) {
    for (uint32_t n = 1; n <= 17; n++) {
      for (uint32_t root = 0; root < n; root++) {
        EXPECT_EQ(hosts::BranchOf(shape, n, root, root).parent, root);
        std::vector<uint32_t> reached{root};
        for (size_t i = 0; i < reached.size() && reached.size() <= n; i++) {
          for (const uint32_t child : hosts::BranchOf(shape, n, root, reached[i]).children) {
            EXPECT_EQ(hosts::BranchOf(shape, n, root, child).parent, reached[i]);
            reached.push_back(child);
          }
        }
        std::sort(reached.begin(), reached.end());
        Members all(n);
        for (uint32_t h = 0; h < n; h++) all[h] = h;
        EXPECT_EQ(reached, all) << static_cast<int>(shape) << " of " << n << " from " << root;
      }
    }
  }
}

TEST(HostsAuto, ChangesOverByWhatWasMeasuredAndByTheNumberOfHosts) {
  constexpr uint32_t kStep = 100'000, kByte = 8'000;  // 0.1 ms, 1 Gbit/s
  const auto edge = [](uint32_t n, uint32_t step, uint32_t byte) { return RingFrom(Measured(n, step, byte)); };
  EXPECT_EQ(edge(2, 0, 0), 125'000U);
  EXPECT_EQ(edge(2, kStep, kByte), 125'000U);
  EXPECT_NEAR(double(edge(1024, kStep, kByte)), 2.8e6, 0.1e6);
  for (const uint32_t n : {2U, 3U, 4U, 7U, 64U, 1024U}) {
    const auto here = static_cast<double>(edge(n, kStep, kByte));
    EXPECT_NEAR(double(edge(n, 10 * kStep, kByte)), 10 * here, 0.01 * here + 10) << n;
    EXPECT_NEAR(double(edge(n, kStep, 10 * kByte)), here / 10, 0.01 * here + 10) << n;
    // Of slices that go side by side the waits pass together.
    EXPECT_NEAR(double(RingFrom(Measured(n, kStep, kByte), 4)), here / 4, 0.01 * here + 10) << n;
  }
  // The worst that any has measured counts.
  auto measured = Measured(4, kStep, kByte);
  measured[2].step_ns = 10 * kStep;
  EXPECT_EQ(RingFrom(measured), edge(4, 10 * kStep, kByte));
  // Figures and sizes beyond all bounds.
  for (const uint32_t n : {2U, 1000U}) {
    EXPECT_EQ(Selected(Measured(n, UINT32_MAX, 1), 1 << 20), "doubling");
    const uint64_t most = hosts::Ring().range().most_bytes;
    EXPECT_EQ(most, uint64_t{1} << 40);
    EXPECT_EQ(Selected(Measured(n, 1, UINT32_MAX), most), "ring");
    EXPECT_EQ(Selected(Measured(n, 1, UINT32_MAX), most + 1), "doubling") << "a ring has no more tags";
  }
}

TEST(HostsAuto, GoesAroundAHostWhoseCableIsSlow) {
  constexpr uint64_t kSlice = 1 << 20;
  const auto at = [](uint32_t n, uint32_t slow, uint32_t rate) {
    auto measured = Measured(n, 0, 0);
    for (hosts::Figures& each : measured) each.cable = 125'000;
    measured[slow].cable = rate;
    measured[slow].is_all = 1;
    return measured;
  };
  const auto order = [&](uint32_t n, uint32_t slow) {
    const auto algorithm = hosts::SelectAlgorithm(Strategy::kAuto, at(n, slow, 12'500), kSlice, 4);
    EXPECT_STREQ(algorithm->name(), "tree") << n;
    return dynamic_cast<const hosts::Trees&>(*algorithm).order();
  };
  EXPECT_EQ(order(4, 1), (Members{0, 2, 3, 1}));
  for (uint32_t n = 3; n <= 9; n++) {
    for (uint32_t slow = 0; slow < n; slow++) EXPECT_EQ(order(n, slow).back(), slow);
  }
  EXPECT_EQ(Selected(at(2, 1, 12'500), kSlice, 4), "ring") << "of two hosts both have the same to send";
  EXPECT_EQ(Selected(at(4, 1, 100'000), kSlice, 4), "ring") << "at four fifths of it the others would have more to do";
  auto unknown = at(4, 1, 12'500);
  unknown[3].cable = 0;
  EXPECT_EQ(Selected(unknown, kSlice, 4), "ring") << "one of them may be as slow";
  auto idle = at(4, 1, 12'500);
  idle[1].is_all = 0;
  EXPECT_EQ(Selected(idle, kSlice, 4), "ring") << "it may carry more than it had to";
  EXPECT_EQ(Selected(at(4, 1, 12'500), 4, 1), "doubling");
}

TEST(HostsAuto, BroadcastsManyBytesAlongAChain) {
  const auto shape = [](uint32_t n, uint64_t bytes) {
    return hosts::SelectBroadcastShape(Strategy::kAuto, Measured(n, 100'000, 8'000), bytes);
  };
  EXPECT_EQ(shape(4, 4), Shape::kBinomial);
  EXPECT_EQ(shape(4, 64 << 20), Shape::kChain);
  EXPECT_EQ(shape(1000, 1 << 20), Shape::kBinomial);
  EXPECT_EQ(shape(2, 64 << 20), Shape::kBinomial);
}

// What a tree in another order adds up, and that it ends.
TEST(HostsAuto, TreesOfAnyOrderAgree) {
  Hosts hosts(4);
  constexpr size_t kCount = 200'000;
  hosts.Run([&](uint32_t self, Mesh& mesh) {
    uint64_t sequence = 0;
    for (const bool many : {false, true}) {
      for (const Members& order : {Members{3, 1, 0, 2}, Members{1, 2, 3, 0}}) {
        std::vector<int32_t> x(kCount, static_cast<int32_t>(1 << self));
        const hosts::Trees trees(Shape::kBinary, many, order);
        trees.Run({Everyone(mesh), Tag::Of("order", sequence++), KF_INT32, KF_SUM, x.data(), x.data(), kCount});
        EXPECT_EQ(std::count(x.begin(), x.end(), 15), std::ptrdiff_t(kCount));
      }
    }
  });
}

class MeterTest : public ::testing::Test {
 protected:
  using microseconds = std::chrono::microseconds;
  // `times` operations side by side, of which all together take so long.
  void Pass(hosts::Cost cost, microseconds took, int times = 1) {
    for (int i = 0; i < times; i++) meter_.Begin(now_);
    now_ += took;
    for (int i = 0; i < times; i++) meter_.End(now_, &cost);
  }

  tcp::Mesh::Cable cable_{125'000, true};
  hosts::Meter meter_{[this] { return cable_; }};
  hosts::Meter::Clock::time_point now_{};
};

TEST_F(MeterTest, TellsStepsAndBytesApartAndSharesTheCable) {
  for (int i = 0; i < 5; i++) {
    EXPECT_EQ(meter_.figures().step_ns, 0U);
    Pass({2, 16}, microseconds(160));
  }
  EXPECT_EQ(meter_.figures().step_ns, 80'000U);
  EXPECT_EQ(meter_.figures().byte_ps, 0U);
  EXPECT_EQ(meter_.figures().cable, 0U);
  // Four at a time: 4 MB at 8 ns, and the four waits of 2 steps pass together.
  for (int i = 0; i < 5; i++) Pass({2, 1'000'000}, microseconds(32'000 + 160), 4);
  EXPECT_EQ(meter_.figures().byte_ps, 8'000U);
  EXPECT_EQ(meter_.figures().step_ns, 80'000U);
  EXPECT_EQ(meter_.figures().cable, 125'000U);
  EXPECT_EQ(meter_.figures().is_all, 1U);
}

TEST_F(MeterTest, ChangesItsMindWhenTheNetworkDoesAndNotForADisturbance) {
  for (int i = 0; i < 20; i++) Pass({1, 16}, microseconds(100));
  for (int i = 0; i < 7; i++) Pass({1, 16}, microseconds(5000));
  EXPECT_EQ(meter_.figures().step_ns, 100'000U);
  for (int i = 0; i < 8; i++) Pass({1, 16}, microseconds(140));
  EXPECT_EQ(meter_.figures().step_ns, 100'000U);
  for (int i = 0; i < 8; i++) Pass({1, 16}, microseconds(200));
  EXPECT_EQ(meter_.figures().step_ns, 200'000U);
}

TEST_F(MeterTest, CountsNothingOfWhatFailed) {
  for (int i = 0; i < 20; i++) {
    const hosts::Cost cost{1, 16};
    meter_.Begin(now_);
    meter_.Begin(now_);
    meter_.End(now_, &cost);
    meter_.End(now_, nullptr);
  }
  EXPECT_EQ(meter_.figures().step_ns, 0U);
}

TEST(HostsStrategies, HaveKungFusNames) {
  EXPECT_EQ(hosts::StrategyNamed("AUTO"), Strategy::kAuto);
  EXPECT_EQ(hosts::StrategyNamed("TREE"), Strategy::kStar);
  EXPECT_EQ(hosts::StrategyNamed("CLIQUE"), Strategy::kMultiStar);
  EXPECT_EQ(hosts::StrategyNamed("BINARY_TREE"), Strategy::kBinaryTree);
  EXPECT_EQ(hosts::StrategyNamed("MULTI_BINARY_TREE_STAR"), Strategy::kMultiBinaryTree);
  EXPECT_THROW(hosts::StrategyNamed("SHM"), Error);
}

// Inputs whose sums are rounded, also NaN of different kinds: the same bits everywhere, in every order of arrival.
TEST(HostsAllReduce, AllHostsHaveTheSameBits) {
  for (uint32_t n = 2; n <= 5; n++) {
    Hosts hosts(n);
    for (uint64_t round = 0; round < 2 * std::size(kStrategies); round++) {
      const size_t count = round % 2 == 0 ? 5003 : 700001;
      std::vector<std::vector<float>> inputs(n, std::vector<float>(count)), outputs = inputs;
      for (uint32_t h = 0; h < n; h++) {
        std::mt19937 random(static_cast<uint32_t>(Seed() + round * 10 + h));
        for (float& x : inputs[h]) x = std::ldexp(static_cast<float>(random()) - 2e9f, static_cast<int>(random() % 20));
        const uint32_t nan = 0x7fc00000u + h;
        std::memcpy(&inputs[h][count / 2], &nan, sizeof nan);
      }
      hosts.Run([&](uint32_t self, Mesh& mesh) {
        AllReduce(Everyone(mesh), Tag::Of("bits", round), kStrategies[round / 2], KF_FLOAT32, KF_SUM,
                  inputs[self].data(), outputs[self].data(), count);
      });
      for (uint32_t h = 1; h < n; h++) ASSERT_EQ(std::memcmp(outputs[h].data(), outputs[0].data(), count * 4), 0);
      for (size_t i = 0; i < count; i++) {
        double sum = 0, magnitude = 0;
        for (uint32_t h = 0; h < n; h++) {
          sum += inputs[h][i];
          magnitude += std::fabs(inputs[h][i]);
        }
        // n-1 additions, each rounded to 24 bits, of sums no larger than the magnitudes'.
        if (i != count / 2) {
          ASSERT_LE(std::fabs(outputs[0][i] - sum), (n - 1) * magnitude * 0x1p-24) << i;
        }
      }
      EXPECT_TRUE(std::isnan(outputs[0][count / 2]));
    }
  }
}

TEST(HostsAllReduce, OneThatHasAllPartsComesToTheBitsOfDoubling) {
  std::mt19937 random(Seed());
  for (uint32_t n = 1; n <= 9; n++) {
    Hosts hosts(n, 1);
    uint64_t round = 0;
    for (const kf_dtype dtype : {KF_FLOAT32, KF_FLOAT16, KF_FLOAT64, KF_INT32}) {
      for (const size_t count : {size_t{1}, size_t{5}}) {
        const size_t bytes = count * SizeOf(dtype);
        std::vector<std::vector<char>> in(n, std::vector<char>(bytes)), out = in;
        std::vector<const void*> parts;
        for (auto& part : in) {
          for (size_t i = 0; i < count; i++) {
            if (dtype == KF_FLOAT32) {
              const float x = std::ldexp(static_cast<float>(random()) - 2e9f, static_cast<int>(random() % 20));
              std::memcpy(part.data() + i * sizeof x, &x, sizeof x);
            } else if (dtype == KF_FLOAT64) {
              const double x = std::ldexp(static_cast<double>(random()) - 2e9, static_cast<int>(random() % 90));
              std::memcpy(part.data() + i * sizeof x, &x, sizeof x);
            } else if (dtype == KF_FLOAT16) {
              const auto x = static_cast<uint16_t>(random() % 0x5000 | random() % 2 << 15);  // below 32
              std::memcpy(part.data() + i * sizeof x, &x, sizeof x);
            } else {
              const auto x = static_cast<int32_t>(random() % 1000);
              std::memcpy(part.data() + i * sizeof x, &x, sizeof x);
            }
          }
          parts.push_back(part.data());
        }
        hosts.Run([&](uint32_t self, Mesh& mesh) {
          hosts::Doubling().Run(
              {Everyone(mesh), Tag::Of("by all", round), dtype, KF_SUM, in[self].data(), out[self].data(), count});
        });
        std::vector<char> alone(bytes);
        hosts::Doubling::ReduceAlone(dtype, KF_SUM, parts, alone.data(), count);
        EXPECT_EQ(alone, out[n - 1]) << n << " hosts, dtype " << dtype << ", " << count;
        round++;
      }
    }
  }
}

TEST(HostsAllReduce, RefusesMeansAndRanksOutsideTheGroup) {
  Hosts hosts(2);
  float x = 1;
  EXPECT_THROW(AllReduce(Everyone(hosts.at(0)), Tag::Of("x", 0), Strategy::kAuto, KF_FLOAT32, KF_MEAN, &x, &x, 1),
               Error);
  EXPECT_THROW(AllReduce(Everyone(hosts.at(0)), Tag::Of("x", 0), Strategy::kAuto, kf_dtype(12), KF_SUM, &x, &x, 1),
               Error);
  EXPECT_THROW(hosts::Group(hosts.at(0), kEpoch, {1}), Error);
  EXPECT_THROW(hosts::Group(hosts.at(0), kEpoch, {0, 2}), Error);
  EXPECT_THROW(hosts::Group(hosts.at(0), kEpoch, {1, 0}), Error);
  EXPECT_THROW(Broadcast(Everyone(hosts.at(0)), Tag::Of("x", 0), Shape::kBinomial, 2, &x, 4), Error);
}

TEST(HostsAllReduce, RefusesWhatIsOutOfItsAlgorithmsRange) {
  Hosts lone(1), hosts(2);
  float x = 1;
  const hosts::Ring ring;
  const hosts::Trees tree(Shape::kBinary, /*around_each=*/false);
  for (const hosts::Algorithm* const each : std::vector<const hosts::Algorithm*>{&ring, &tree}) {
    EXPECT_THROW(each->Run({Everyone(lone.at(0)), Tag::Of("x", 0), KF_FLOAT32, KF_SUM, &x, &x, 1}), Error);
    const size_t too_many = each->range().most_bytes / sizeof x + 1;
    EXPECT_THROW(each->Run({Everyone(hosts.at(0)), Tag::Of("x", 0), KF_FLOAT32, KF_SUM, &x, &x, too_many}), Error);
  }
}

TEST(HostsBroadcast, CopiesFromEveryRoot) {
  constexpr Shape shapes[] = {Shape::kBinomial, Shape::kChain, Shape::kStar, Shape::kBinary};
  for (uint32_t n = 1; n <= 5; n++) {
    Hosts hosts(n);
    uint64_t sequence = 0;
    for (uint32_t root = 0; root < n; root++) {
      for (const size_t bytes : {size_t{0}, size_t{1}, size_t{33333}, hosts::kPieceBytes, size_t{3000001}}) {
        const std::vector<char> data = Pattern(bytes, root);
        hosts.Run([&](uint32_t self, Mesh& mesh) {
          std::vector<char> here = self == root ? data : std::vector<char>(bytes);
          here.push_back(42);
          Broadcast(Everyone(mesh), Tag::Of("b", sequence), shapes[sequence % std::size(shapes)], root, here.data(),
                    bytes);
          EXPECT_EQ(here.back(), 42);
          here.pop_back();
          EXPECT_EQ(here == data, true) << bytes << " bytes from " << root << " at " << self << " of " << n;
        });
        sequence++;
      }
    }
  }
}

TEST(HostsAllGather, HasTheRowsOfAllInTheirOrder) {
  for (uint32_t n = 1; n <= 5; n++) {
    Hosts hosts(n);
    uint64_t sequence = 0;
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{40}, size_t{32769}}) {
      std::vector<char> expected;
      for (uint32_t h = 0; h < n; h++) {
        const std::vector<char> row = Pattern(bytes, h);
        expected.insert(expected.end(), row.begin(), row.end());
      }
      hosts.Run([&](uint32_t self, Mesh& mesh) {
        const std::vector<char> row = Pattern(bytes, self);
        std::vector<char> rows(n * bytes, 42);
        AllGather(Everyone(mesh), Tag::Of("g", 2 * sequence), row.data(), rows.data(), bytes);
        EXPECT_EQ(rows == expected, true) << bytes << " at " << self << " of " << n;
        std::fill(rows.begin(), rows.end(), char(42));  // in place
        std::copy(row.begin(), row.end(), rows.begin() + static_cast<std::ptrdiff_t>(self * bytes));
        AllGather(Everyone(mesh), Tag::Of("g", 2 * sequence + 1), rows.data() + self * bytes, rows.data(), bytes);
        EXPECT_EQ(rows == expected, true) << "in place";
      });
      sequence++;
    }
  }
}

// Threads that each run all of their operations, in an order that differs from host to host, beside each other.
TEST(HostsOperations, RunSideBySideInAnyOrderOfThreads) {
  constexpr uint32_t kThreads = 4;
  for (uint32_t n = 2; n <= 4; n++) {
    Hosts hosts(n);
    hosts.Run([&](uint32_t self, Mesh& mesh) {
      std::vector<std::thread> threads;
      for (uint32_t t = 0; t < kThreads; t++) {
        threads.emplace_back([&, who = (t + self) % kThreads] {  // the same work starts at other times elsewhere
          const hosts::Group group = Everyone(mesh);
          const std::string name = "thread " + std::to_string(who);
          for (uint64_t i = 0; i < 30; i++) {
            const size_t count = i % 7 == 0 ? 300000 + who : 1 + i * 500;
            std::vector<int32_t> x(count, static_cast<int32_t>(self + who + i)), rows(n);
            AllReduce(group, Tag::Of(name, i), kStrategies[i % std::size(kStrategies)], KF_INT32, KF_SUM, x.data(),
                      x.data(), count);
            const auto sum = static_cast<int32_t>(n * (n - 1) / 2 + n * (who + i));
            EXPECT_EQ(std::count(x.begin(), x.end(), sum), std::ptrdiff_t(count));
            const auto own = static_cast<int32_t>(self * 100 + who);
            AllGather(group, Tag::Of(name + " rows", i), &own, rows.data(), 4);
            for (uint32_t h = 0; h < n; h++) EXPECT_EQ(rows[h], static_cast<int32_t>(h * 100 + who));
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
  }
}

// A host that comes late is asked for no more pieces than it keeps a note of, however large the operation.
TEST(HostsOperations, AskALateHostForFewPiecesAhead) {
  constexpr size_t kBytes = 4096 * hosts::kPieceBytes;  // never touched
  void* const memory =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const std::function<void(const hosts::Group&, const Tag&)> operations[] = {
      [&](const auto& group, const Tag& tag) { Broadcast(group, tag, Shape::kChain, 0, memory, kBytes); },
      [&](const auto& group, const Tag& tag) {
        AllReduce(group, tag, Strategy::kRing, KF_FLOAT32, KF_SUM, memory, memory, kBytes / 4);
      },
      [&](const auto& group, const Tag& tag) {
        AllReduce(group, tag, Strategy::kBinaryTree, KF_FLOAT32, KF_SUM, memory, memory, kBytes / 4);
      }};
  for (const auto& operation : operations) {
    Hosts hosts(2);
    std::thread early([&] {
      try {
        operation(Everyone(hosts.at(1)), Tag::Of("large", 0));
        ADD_FAILURE() << "it is over without the other host";
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), KF_STALE) << error.what();
      }
    });
    const auto asked = [&] { return hosts.at(0).Counted(1).received / sizeof(tcp::FrameHeader); };
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (asked() < hosts::kAhead && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    for (uint64_t before = 0; before != asked();) {
      before = asked();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    EXPECT_GE(asked(), hosts::kAhead);
    EXPECT_LE(asked(), hosts::kAhead + hosts::kWindow);
    hosts.at(1).Cancel(kEpoch + 1);
    early.join();
  }
  munmap(memory, kBytes);
}

// A host that waits for the lost one learns of it, has all others go over to a new epoch (as the hosts' launchers do),
// and they do it again as a smaller group.
TEST(HostsOperations, GoOnWithoutALostHost) {
  for (uint32_t round = 0; round < 40 / kSlower; round++) {
    const uint32_t n = 3 + round % 3, victim = round % n;
    const Strategy strategy = kStrategies[round % std::size(kStrategies)];
    Hosts hosts(n);
    std::mt19937 random(Seed() + round);
    const auto lives_us = random() % 20000;
    Members living;
    for (uint32_t h = 0; h < n; h++) {
      if (h != victim) living.push_back(h);
    }
    std::once_flag over;
    hosts.Run([&](uint32_t self, Mesh& mesh) {
      if (self == victim) {
        std::this_thread::sleep_for(std::chrono::microseconds(lives_us));
        hosts.End(victim);  // no other thread looks at it
        return;
      }
      std::vector<float> x(200000);
      try {
        // The victim takes part in nothing, so no host gets further than the first one.
        AllReduce(Everyone(mesh), Tag::Of("x", 0), strategy, KF_FLOAT32, KF_SUM, x.data(), x.data(), x.size());
        ADD_FAILURE() << "it went on without host " << victim;
      } catch (const Error& error) {
        EXPECT_TRUE(error.status() == KF_PEER_LOST || error.status() == KF_STALE) << error.what();
        if (error.status() == KF_PEER_LOST) {
          EXPECT_NE(std::string(error.what()).find(HostName(victim)), std::string::npos) << error.what();
        }
        std::call_once(over, [&] {
          EXPECT_EQ(error.status(), KF_PEER_LOST);
          for (const uint32_t h : living) hosts.at(h).Cancel(kEpoch + 1);
        });
      }
      std::fill(x.begin(), x.end(), 1.0f + self);
      AllReduce(hosts::Group(mesh, kEpoch + 1, living), Tag::Of("x", 0), strategy, KF_FLOAT32, KF_SUM, x.data(),
                x.data(), x.size());
      float sum = 0;
      for (const uint32_t h : living) sum += 1.0f + h;
      EXPECT_EQ(std::count(x.begin(), x.end(), sum), std::ptrdiff_t(x.size()));
    });
  }
}

}  // namespace
}  // namespace kungfu::testing
