// Collectives of a cluster over several hosts: values, mismatches, failures of ranks, ends of hosts.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "base/fault_point.h"
#include "clusters.h"
#include "collectives/dtype.h"
#include "killed_ranks.h"
#include "ranks.h"
#include "runtime/background.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using std::chrono::microseconds;

// Hosts of the ranks: even, uneven, one rank a host, and in no order, as after some changes.
const std::vector<std::vector<uint32_t>> kLayouts = {
    {0, 0, 1, 1}, {0, 1, 1, 1}, {0, 1, 2}, {0, 1, 0, 2, 1, 0}, {0, 0, 1, 1, 2, 2, 3, 3}};

// Of a cluster whose all-reduces go in slices of so many bytes.
CommunicatorOptions InSlices(size_t bytes) {
  CommunicatorOptions options{std::chrono::seconds(60), std::chrono::seconds(60)};
  options.slice_bytes = bytes;
  return options;
}

template <typename T>
std::vector<T> AllReduced(Communicator& communicator, const char* name, const std::vector<T>& in, kf_dtype dtype,
                          kf_op op) {
  std::vector<T> out(in.size());
  communicator.Run(Op(Kind::kAllReduce, name, {{in.data(), out.data(), in.size()}}, dtype, op));
  return out;
}

TEST(Cluster, ReductionsHaveTheValuesOfOneHost) {
  for (const auto& layout : kLayouts) {
    Clusters cluster(layout);
    const auto n = static_cast<int>(cluster.size());
    cluster.Run([&](uint32_t rank, Communicator& c) {
      const int r = static_cast<int>(rank);
      for (const size_t count : {size_t{1}, size_t{7}, size_t{3000}, size_t{300000}}) {
        std::vector<float> in(count);
        for (size_t i = 0; i < count; i++) in[i] = static_cast<float>(r + static_cast<int>(i % 5));
        const auto at = [&](size_t i, auto f) { return static_cast<float>(f(static_cast<int>(i % 5))); };
        const size_t last = count - 1;
        EXPECT_EQ(AllReduced(c, "sum", in, KF_FLOAT32, KF_SUM)[last],
                  at(last, [&](int k) { return n * (n - 1) / 2 + n * k; }));
        EXPECT_EQ(AllReduced(c, "max", in, KF_FLOAT32, KF_MAX)[last], at(last, [&](int k) { return n - 1 + k; }));
        EXPECT_EQ(AllReduced(c, "min", in, KF_FLOAT32, KF_MIN)[last], at(last, [&](int k) { return k; }));
        EXPECT_NEAR(AllReduced(c, "mean", in, KF_FLOAT32, KF_MEAN)[last],
                    at(last, [&](int k) { return k; }) + static_cast<float>(n - 1) / 2, 1e-5);
      }
      // Sums of these would overflow, and their mean is truncated once.
      EXPECT_EQ(AllReduced<int8_t>(c, "narrow", {static_cast<int8_t>(120 + r)}, KF_INT8, KF_MEAN)[0],
                120 + (n - 1) / 2);
    });
  }
}

TEST(Cluster, SlicesHaveTheValuesOfTheWhole) {
  for (const auto& layout : kLayouts) {
    Clusters cluster(layout, /*recovers=*/layout.size() % 2 == 0, InSlices(4000));
    const auto n = static_cast<int>(cluster.size());
    cluster.Run([&](uint32_t rank, Communicator& c) {
      for (const bool in_place : {false, true}) {
        for (const size_t each : {size_t{250}, size_t{999}, size_t{7001}}) {
          // The second is empty, and slices end within the others.
          const size_t counts[] = {each, 0, 2 * each + 1, 3};
          std::vector<std::vector<float>> in, out;
          for (size_t t = 0; t < 4; t++) {
            in.emplace_back(counts[t]);
            for (size_t i = 0; i < counts[t]; i++) in[t][i] = static_cast<float>((rank + 1) * (t + i % 100));
            out.push_back(in_place ? in[t] : std::vector<float>(counts[t]));
          }
          std::vector<kf_tensor> tensors;
          for (size_t t = 0; t < 4; t++) {
            tensors.push_back({in_place ? out[t].data() : in[t].data(), out[t].data(), counts[t]});
          }
          c.Run(Op(Kind::kAllReduce, "sliced", tensors, KF_FLOAT32, KF_SUM));
          for (size_t t = 0; t < 4; t++) {
            for (size_t i = 0; i < counts[t]; i++) {
              ASSERT_EQ(out[t][i], static_cast<float>(n * (n + 1) / 2 * static_cast<int>(t + i % 100)))
                  << t << " " << i;
            }
          }
        }
      }
    });
  }
}

// MarkLost sets a rank's state first, and says then whether the others go on without it.
// 1e8 - 1e8 + 1, whose sum says in which order it was added: by doubling all of it in the hosts' order, around a ring
// all but the first third from another host on, where the 1 is lost.
TEST(Cluster, AllHostsTakeTheAlgorithmThatOneOfThemHasMeasured) {
  Clusters cluster({0, 1, 2});
  const auto lone_ones = [&] {
    std::vector<size_t> kept(3);  // by rank: how many 1 were
    cluster.Run([&](uint32_t rank, Communicator& c) {
      const float own[] = {1e8f, -1e8f, 1};
      const auto sums = AllReduced(c, "sum", std::vector<float>(30'000, own[rank]), KF_FLOAT32, KF_SUM);
      kept[rank] = static_cast<size_t>(std::count(sums.begin(), sums.end(), 1.0f));
    });
    return kept;
  };
  EXPECT_EQ(lone_ones(), std::vector<size_t>(3, 10'000));
  const auto slow = [&](uint32_t host, std::chrono::milliseconds step) {
    hosts::Meter& meter = cluster.transport(host).meter();
    const hosts::Cost one{1, 4};
    const auto now = hosts::Meter::Clock::now();
    for (int i = 0; i < 15; i++) {
      meter.Begin(now);
      meter.End(now + step, &one);
    }
  };
  slow(1, std::chrono::milliseconds(50));
  EXPECT_EQ(cluster.transport(0).meter().figures().step_ns, 0U);
  EXPECT_EQ(lone_ones(), std::vector<size_t>(3, 30'000));
  slow(1, std::chrono::milliseconds(1));
  slow(2, std::chrono::milliseconds(50));
  EXPECT_EQ(lone_ones(), std::vector<size_t>(3, 30'000));
}

TEST(Cluster, ALossThatIsNotListedYetIsTakenForNoEnd) {
  const int fd = shm::Segment::Create(3, /*cluster_version=*/7, /*cores=*/2, /*recovers=*/true);
  const auto segment = std::make_shared<shm::Segment>(fd);
  close(fd);
  shm::SegmentControlBlock control(segment);
  const auto mark = [&](uint32_t rank) {
    segment->status(rank).state.value = static_cast<uint32_t>(RankState::kLost) | shm::Counter::kFence;
  };
  mark(1);
  EXPECT_FALSE(control.EndedForAll(1));
  control.MarkLost(2, "exited with code 0", /*recover=*/false, /*reaped=*/true);
  EXPECT_FALSE(control.EndedForAll(1));
  EXPECT_FALSE(control.EndedForAll(2));  // it could be 1 that is counted
  segment->header().failure_order[0] = 1;
  segment->header().num_failed = 1;
  EXPECT_FALSE(control.EndedForAll(1));
  EXPECT_TRUE(control.EndedForAll(2));
  EXPECT_FALSE(control.EndedForAll(0));
}

// One of them beyond what one host can have dies.
TEST(Cluster, MoreRanksThanOneHostCanHaveReduceAndGoOnWithoutOne) {
  constexpr uint32_t kRanks = 270, kHosts = 3, kFailedRank = 265;
  static_assert(kFailedRank > shm::kMaxRanks);
  std::vector<uint32_t> layout;
  for (uint32_t r = 0; r < kRanks; r++) layout.push_back(r * kHosts / kRanks);
  Clusters cluster(layout, /*recovers=*/true);
  const auto reduce = [&](uint32_t rank, Communicator& c) {
    const auto all = AllReduced<float>(c, "sum", {static_cast<float>(rank), 1}, KF_FLOAT32, KF_SUM);
    EXPECT_EQ(all[0], static_cast<float>(kRanks * (kRanks - 1) / 2 - (all[1] < kRanks ? kFailedRank : 0)));
    return all[1];
  };
  cluster.Run([&](uint32_t rank, Communicator& c) { EXPECT_EQ(reduce(rank, c), kRanks); });
  cluster.MarkLost(kFailedRank);
  cluster.Run([&](uint32_t rank, Communicator& c) {
    if (rank != kFailedRank) EXPECT_EQ(reduce(rank, c), kRanks - 1);
  });
}

std::atomic<int> steps{0};

// When all hosts have measured what a step takes: which changes no bit.
TEST(Cluster, FewBytesGoWithTheHostsWords) {
  for (const auto& layout : std::vector<std::vector<uint32_t>>{{0, 0, 1, 1}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}}) {
    fault_hook = [](const char* place) {
      if (std::strcmp(place, "between two doublings") == 0) steps++;
    };
    steps = 0;
    int at_first = 0, later = 0;
    {
      Clusters cluster(layout);
      const auto sum = [&](uint32_t rank, Communicator& c) {
        std::mt19937 random(rank);
        std::vector<float> in(10), out(10);  // as many bytes as may
        for (float& x : in) x = std::ldexp(static_cast<float>(random()) - 2e9f, static_cast<int>(random() % 20));
        c.Run(Op(Kind::kAllReduce, "few", {{in.data(), out.data(), 3}, {&in[3], &out[3], 7}}, KF_FLOAT32));
        return out;
      };
      std::vector<std::vector<float>> first(cluster.size());
      const auto sums = [&](int times) {
        cluster.Run([&](uint32_t rank, Communicator& c) {
          for (int i = 0; i < times; i++) EXPECT_EQ(sum(rank, c), first[0]) << i;
        });
        return steps.exchange(0);
      };
      cluster.Run([&](uint32_t rank, Communicator& c) { first[rank] = sum(rank, c); });
      for (const auto& other : first) EXPECT_EQ(other, first[0]);
      at_first = sums(31);
      later = sums(32);
    }
    fault_hook = nullptr;
    const int each = layout.back() == 1 ? 2 : 8;  // doublings of an operation, on all hosts
    EXPECT_EQ(later, 2 * each);
    EXPECT_GT(at_first, later);
  }
}

// Nor has a host without ranks any part in them, zeros least of all.
TEST(Cluster, FewBytesAreThoseOfHostsWithRanks) {
  Clusters cluster({0, 1, 2}, /*recovers=*/true);
  const auto reduce = [&](uint32_t last, float least) {
    cluster.Run([&](uint32_t rank, Communicator& c) {
      for (int i = 0; rank <= last && i < 20; i++) {
        const float x = static_cast<float>(10 - rank);
        EXPECT_EQ(AllReduced<float>(c, "least", {x}, KF_FLOAT32, KF_MIN)[0], least);
        EXPECT_EQ(AllReduced<float>(c, "product", {x}, KF_FLOAT32, KF_PROD)[0], last == 2 ? 720 : 90);
        EXPECT_EQ(AllReduced<float>(c, "mean", {x}, KF_FLOAT32, KF_MEAN)[0], last == 2 ? 9 : 9.5F);
      }
    });
  };
  reduce(2, 8);
  cluster.MarkLost(2);
  reduce(1, 9);
}

// A strategy that is named holds for few bytes, too.
TEST(Cluster, FewBytesGoByTheNamedStrategy) {
  fault_hook = [](const char* place) {
    if (std::strcmp(place, "between two pieces of the ring") == 0) steps++;
  };
  steps = 0;
  {
    Clusters cluster({0, 1}, /*recovers=*/false, {std::chrono::seconds(60), std::chrono::seconds(60)},
                     hosts::Strategy::kRing);
    cluster.Run([&](uint32_t, Communicator& c) {
      for (int i = 0; i < 20; i++) EXPECT_EQ(AllReduced<float>(c, "few", {1, 2}, KF_FLOAT32, KF_SUM)[1], 4);
    });
  }
  fault_hook = nullptr;
  EXPECT_EQ(steps, 20 * 2);
}

// Host 0 has brought its few bytes when host 1 tells of a generation for which it has to bring them again.
TEST(Cluster, FewBytesAreBroughtAgainWithoutFailedRanks) {
  Clusters cluster({0, 0, 1, 1}, /*recovers=*/true);
  const auto sum = [](uint32_t rank, Communicator& c) {
    return AllReduced<float>(c, "few", {static_cast<float>(1 << rank)}, KF_FLOAT32, KF_SUM)[0];
  };
  cluster.Run([&](uint32_t rank, Communicator& c) {
    for (int i = 0; i < 20; i++) EXPECT_EQ(sum(rank, c), 15);
  });
  std::atomic<bool> have_failed{false};
  std::thread launchers([&] {
    std::this_thread::sleep_for(100ms);  // until both have brought theirs
    for (const uint32_t rank : {1U, 3U}) cluster.MarkLost(rank);
    have_failed = true;
  });
  const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
    while (rank > 1 && !have_failed) std::this_thread::sleep_for(1ms);
    if (rank < 3) EXPECT_EQ(sum(rank, c), 5);
  });
  launchers.join();
  EXPECT_FALSE(errors[0]);
  EXPECT_TRUE(errors[1]);
  EXPECT_FALSE(errors[2]);
}

TEST(Cluster, AMeanCountsByWeights) {
  Clusters cluster({0, 1, 1});
  cluster.Run([&](uint32_t rank, Communicator& c) {
    for (int round = 0; round < 20; round++) {
      const float in = rank == 2 ? 100.F : static_cast<float>(rank + 1);
      float out = 0;
      const kf_tensor tensor{&in, &out, 1};
      Operation mean{Kind::kAllReduce, "weighted", &tensor, 1, KF_FLOAT32, KF_MEAN};
      mean.weighting.applies = true;
      mean.weighting.own = rank == 0 ? 1 : rank == 1 ? 3 : 0;
      c.Run(mean);
      EXPECT_FLOAT_EQ(out, (1 * 1 + 3 * 2) / 4.F);
      mean.weighting.own = 0;  // no rank counts: all alike
      c.Run(mean);
      EXPECT_FLOAT_EQ(out, 103 / 3.F);
      // A whole host counts for nothing, and brings what would spoil every sum.
      const float counts_or_not = rank == 0 ? 7 : std::nanf("");
      const kf_tensor other{&counts_or_not, &out, 1};
      mean.tensors = &other;
      mean.weighting.own = rank == 0 ? 2 : 0;
      c.Run(mean);
      EXPECT_FLOAT_EQ(out, 7);
    }
  });
}

TEST(Cluster, MovedBytesArriveAtTheirPlace) {
  for (const auto& layout : kLayouts) {
    Clusters cluster(layout);
    const uint32_t n = cluster.size();
    cluster.Run([&](uint32_t rank, Communicator& c) {
      for (const size_t count : {size_t{1}, size_t{4000}, size_t{200000}}) {
        const std::vector<char> mine = Pattern(count, rank), other = Pattern(count + 1, rank + 50);
        std::vector<char> all(n * count), all_other(n * (count + 1));
        c.Run(Op(Kind::kAllGather, "gather", {{mine.data(), all.data(), count}}, KF_UINT8));
        c.Run(Op(Kind::kAllGather, "gather two",
                 {{mine.data(), all.data(), count}, {other.data(), all_other.data(), count + 1}}, KF_UINT8));
        for (uint32_t r = 0; r < n; r++) {
          EXPECT_EQ(std::memcmp(all.data() + r * count, Pattern(count, r).data(), count), 0) << r;
          EXPECT_EQ(std::memcmp(all_other.data() + r * (count + 1), Pattern(count + 1, r + 50).data(), count + 1), 0);
        }
        for (uint32_t root = 0; root < n; root++) {
          std::vector<char> got = rank == root ? mine : std::vector<char>(count);
          c.Run(Op(Kind::kBroadcast, "broadcast", {{got.data(), got.data(), count}}, KF_UINT8, KF_SUM, root));
          EXPECT_EQ(got, Pattern(count, root));
        }
        std::vector<float> parts(n * count), part(count);
        for (size_t i = 0; i < parts.size(); i++) parts[i] = static_cast<float>(i / count);
        c.Run(Op(Kind::kReduceScatter, "scatter", {{parts.data(), part.data(), n * count}}, KF_FLOAT32));
        EXPECT_EQ(part, std::vector<float>(count, static_cast<float>(rank * n)));
      }
      c.Run({Kind::kBarrier, "barrier"});
    });
    cluster.Run([&](uint32_t, Communicator& c) { EXPECT_EQ(c.StateRoot(), 1U); });
  }
}

// What the source ranks bring differs here, so that one sees where it comes from.
TEST(Cluster, BroadcastUsesTheSourceRankOfTheSameHost) {
  for (const auto& layout : kLayouts) {
    Clusters cluster(layout);
    const uint32_t n = cluster.size();
    const hosts::Places& places = cluster.places();
    for (const uint32_t share : {1U, 2U, 3U}) {
      Members sources;
      for (uint32_t r = 0; r < n; r += share) sources.push_back(r);
      std::vector<float> got(n);
      cluster.Run([&](uint32_t rank, Communicator& c) {
        c.SetSources(sources);
        for (const size_t count : {size_t{1}, size_t{300000}}) {
          std::vector<float> x(count, static_cast<float>(rank));
          c.Run(Op(Kind::kBroadcast, "given", {{x.data(), x.data(), count}}, KF_FLOAT32));
          EXPECT_EQ(std::count(x.begin(), x.end(), x[0]), count);
          got[rank] = x[0];
        }
        float x = static_cast<float>(rank);  // of a root that isn't one of them there is no other
        c.Run(Op(Kind::kBroadcast, "alone", {{&x, &x, 1}}, KF_FLOAT32, KF_SUM, n - 1));
        EXPECT_TRUE(std::binary_search(sources.begin(), sources.end(), n - 1) || x == static_cast<float>(n - 1));
        c.SetSources({});
        x = static_cast<float>(rank);
        c.Run(Op(Kind::kBroadcast, "from one", {{&x, &x, 1}}, KF_FLOAT32));
        EXPECT_EQ(x, 0);
      });
      std::map<uint32_t, uint32_t> served;
      for (uint32_t h = 0; h < places.hosts(); h++) {
        const Members& there = places.RanksOn(h);
        for (const uint32_t r : there) EXPECT_EQ(got[r], got[there[0]]);
        const auto source = std::find_if(there.begin(), there.end(), [&](uint32_t r) { return r % share == 0; });
        if (source != there.end()) {
          EXPECT_EQ(got[there[0]], static_cast<float>(*source));
        } else {
          served[static_cast<uint32_t>(got[there[0]])]++;
        }
      }
      Members giving;  // of a host, its first
      for (uint32_t h = 0; h < places.hosts(); h++) {
        if (const auto source = places.SourceOn(h, 0, sources)) giving.push_back(*source);
      }
      const size_t taking = places.hosts() - giving.size();
      for (const auto& [source, hosts] : served) {
        EXPECT_NE(std::find(giving.begin(), giving.end(), source), giving.end());
        EXPECT_LE(hosts, (taking + giving.size() - 1) / giving.size());
      }
    }
  }
}

TEST(Cluster, OperationsOfSeveralThreadsGoSideBySide) {
  Clusters cluster({0, 0, 1});
  cluster.Run([&](uint32_t rank, Communicator& c) {
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < 12; t++) {
      threads.emplace_back([&, t] {
        const std::string name = "thread " + std::to_string((t + rank * 5) % 12);  // begun in another order at each
        for (int i = 0; i < 30; i++) Sum(c, name.c_str(), 1, 3, 1 + 1000 * ((t + rank * 5) % 12));
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(Cluster, AMismatchIsAnErrorEverywhereAndBreaksNothing) {
  Clusters cluster({0, 0, 1, 1});
  for (const uint32_t odd : {0U, 3U}) {
    for (const bool whole_host : {false, true}) {
      const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
        const bool differs = whole_host ? cluster.places().HostOf(rank) == cluster.places().HostOf(odd) : rank == odd;
        std::vector<float> x(differs ? 3 : 2);
        c.Run(Op(Kind::kAllReduce, "odd", {{x.data(), x.data(), x.size()}}, KF_FLOAT32));
      });
      for (const auto& error : errors) {
        EXPECT_EQ(ErrorOf(error).status(), KF_MISMATCH) << ErrorOf(error).what();
        EXPECT_NE(std::string(ErrorOf(error).what()).find("3 float32"), std::string::npos) << ErrorOf(error).what();
      }
      cluster.Run([&](uint32_t, Communicator& c) { Sum(c, "odd", 1, 4); });
    }
  }
}

TEST(Cluster, NameThatReadsLikeAPartOfAnOperationIsReportedWhole) {
  Clusters cluster({0, 1});
  for (const std::string name : {"x (slices 1)", "x (agreed between hosts)"}) {
    const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
      std::vector<float> x(2 + rank);
      c.Run(Op(Kind::kAllReduce, name.c_str(), {{x.data(), x.data(), x.size()}}, KF_FLOAT32));
    });
    for (const auto& error : errors) {
      const std::string text = ErrorOf(error).what();
      EXPECT_NE(text.find("with the name \"" + name + "\": "), std::string::npos) << text;
    }
  }
}

TEST(Cluster, AMismatchOfWhatGoesInSlicesIsAnErrorEverywhereAndBreaksNothing) {
  Clusters cluster({0, 0, 1, 1}, /*recovers=*/false, InSlices(4000));
  for (const size_t other : {size_t{1000}, size_t{4999}, size_t{5001}, size_t{9000}}) {  // 1000: one slice's worth
    for (const bool whole_host : {false, true}) {
      const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
        const bool differs = whole_host ? rank < 2 : rank == 3;
        std::vector<float> x(differs ? other : 5000);
        c.Run(Op(Kind::kAllReduce, "odd", {{x.data(), x.data(), x.size()}}, KF_FLOAT32));
      });
      for (const auto& error : errors) {
        EXPECT_EQ(ErrorOf(error).status(), KF_MISMATCH) << ErrorOf(error).what();
        for (const char* const words : {"\"odd\"", "of 5000 float32"}) {
          EXPECT_NE(std::string(ErrorOf(error).what()).find(words), std::string::npos) << ErrorOf(error).what();
        }
      }
      cluster.Run([&](uint32_t, Communicator& c) { Sum(c, "odd", 1, 4); });
      cluster.Run([&](uint32_t, Communicator& c) { Sum(c, "odd", 1, 4, 20000); });
    }
  }
}

// What came of an operation at a rank.
struct Seen {
  bool failed;  // why needn't be the same: each host names what it has seen first
  uint32_t generation;
  std::vector<float> out;
  std::string wrong;  // what isn't as it has to be in that generation

  bool operator==(const Seen& other) const {
    return failed == other.failed && generation == other.generation && out == other.out;
  }
};

// What all ranks do; or, at a rank that is odd, something else.
struct Task {
  enum { kSum, kSumInPlace, kTwoSums, kMean, kBarrier, kBroadcast, kGather, kStarted, kNumKinds } kind;
  size_t count;
  uint32_t root;
  uint32_t odd;     // UINT32_MAX: none
  Members sources;  // of a broadcast, besides the root; empty: none
  uint32_t number;
};

// Of those that took part in what ended in this generation.
float SumOf(const Communicator& c, uint32_t generation) {
  float sum = 0;
  for (const uint32_t r : c.MembersOf(generation)) sum += static_cast<float>(1U << r);
  return sum;
}

// All of it: slices are of one mind, and so are several operations.
std::string NotAll(const float* out, size_t count, float expected, const char* what) {
  const auto bad = std::find_if(out, out + count, [&](float value) { return value != expected; });
  return bad == out + count ? "" : Text(what, ": element ", bad - out, " is ", *bad, " and not ", expected, "; ");
}

// Several sums that some ranks start and wait for together, and others bring as one.
Seen DoStarted(const Task& task, uint32_t rank, const std::shared_ptr<Communicator>& c, Background& background) {
  constexpr size_t kSums = 5;
  const char* const names[kSums] = {"a", "b", "c", "d", "e"};
  std::vector<std::vector<float>> in, out;
  std::vector<std::vector<kf_tensor>> tensors;
  std::vector<Operation> sums;
  for (size_t k = 0; k < kSums; k++) {
    const size_t count = 1 + task.count * k / kSums;
    in.emplace_back(count, static_cast<float>(1U << rank));
    out.emplace_back(count);
    tensors.push_back({{in[k].data(), out[k].data(), count}});
    sums.push_back(Op(Kind::kAllReduce, names[k], tensors[k], KF_FLOAT32));
  }
  if ((rank + task.number) % 2 == 0) {
    c->RunAll(sums.data(), kSums);
  } else {
    std::vector<kf_started> started;
    for (size_t k = 0; k < kSums; k++) started.push_back({background.Start(c, sums[k]), tensors[k].data(), 1});
    background.Wait(started.data(), kSums);
  }
  const uint32_t generation = c->last_generation();
  std::string wrong;
  for (size_t k = 0; k < kSums; k++) {
    wrong += NotAll(out[k].data(), out[k].size(), SumOf(*c, generation), names[k]);
  }
  return {false, generation, {out[0][0]}, wrong};
}

Seen Do(const Task& task, uint32_t rank, Communicator& c) {
  const size_t count = task.count + (rank == task.odd ? 1 : 0);
  std::vector<float> in(count, static_cast<float>(1U << rank)), out(count * c.size()), second(count);
  const std::vector<kf_tensor> first = {{in.data(), out.data(), count}}, other = {{in.data(), second.data(), count}};
  Operation operation = Op(Kind::kAllReduce, "x", first, KF_FLOAT32);
  try {
    uint32_t generation = 0;
    std::string wrong;
    switch (task.kind) {
      case Task::kTwoSums: {
        const Operation both[2] = {operation, Op(Kind::kAllReduce, "y", other, KF_FLOAT32)};
        generation = c.RunAll(both, 2);
        wrong = NotAll(second.data(), count, SumOf(c, generation), "the second");
        break;
      }
      case Task::kSumInPlace: {
        std::copy(in.begin(), in.end(), out.begin());
        const kf_tensor tensor{out.data(), out.data(), count};
        operation.tensors = &tensor;
        operation.num_tensors = 1;
        generation = c.Run(operation);
        break;
      }
      case Task::kMean:
        operation.op = KF_MEAN;
        generation = c.Run(operation);
        break;
      case Task::kBarrier:
        generation = c.Run({Kind::kBarrier, "barrier"});
        break;
      case Task::kBroadcast: {
        operation.kind = Kind::kBroadcast;
        operation.root = task.root;
        const bool gives = std::binary_search(task.sources.begin(), task.sources.end(), rank);
        if (gives) std::fill(in.begin(), in.end(), static_cast<float>(1U << task.root));
        c.SetSources(task.sources);
        generation = c.Run(operation);
        break;
      }
      case Task::kGather:
        operation.kind = Kind::kAllGather;
        generation = c.Run(operation);
        break;
      default:
        generation = c.Run(operation);
    }
    switch (task.kind) {
      case Task::kSum:
      case Task::kSumInPlace:
      case Task::kTwoSums:
        wrong += NotAll(out.data(), count, SumOf(c, generation), "a sum");
        break;
      case Task::kMean: {
        // It is scaled before it is added up, and added up in one order here and in another there.
        const float mean = SumOf(c, generation) / static_cast<float>(c.MembersOf(generation).size());
        const auto [least, most] = std::minmax_element(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(count));
        if (*least < mean * (1 - 1e-5F) || *most > mean * (1 + 1e-5F)) {
          wrong = Text("a mean: from ", *least, " to ", *most, " and not ", mean);
        }
        break;
      }
      case Task::kBroadcast:
        wrong = NotAll(out.data(), count, static_cast<float>(1U << task.root), "a broadcast");
        break;
      default:
        break;
    }
    out.resize(task.kind == Task::kGather ? task.count * c.size() : task.kind == Task::kBarrier ? 0 : 1);
    return {false, generation, out, wrong};
  } catch (const host::FailedEverywhere&) {
    return {true, 0, {}, ""};
  }
}

#if defined(__SANITIZE_THREAD__)
// A rank fenced in the midst of an operation reads on for a moment what others write over (failure_rules.cc, 11), which
// processes that are dead don't.
constexpr bool kGently = true;
#else
constexpr bool kGently = false;
#endif

struct Loss {
  uint32_t rank, host;  // one of them; UINT32_MAX: the other
};

// Ranks make operations. Some are fenced meanwhile, wherever they are (which is what a failure looks like to the
// others), and hosts are lost with all of theirs; the launchers of the other hosts hear of it in one order, but late.
void LiveAndFail(const std::vector<uint32_t>& layout, std::mt19937& random, bool lose_hosts) {
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  Clusters cluster(layout, /*recovers=*/true, InSlices(std::vector<size_t>{1 << 20, 64 << 10, 16 << 10}[below(3)]));
  const uint32_t n = cluster.size(), num_hosts = cluster.places().hosts();
  const size_t most = std::vector<size_t>{1, 200, 100000}[below(3)];
  std::vector<Task> tasks;
  for (int k = 0; k < 60; k++) {
    const auto kind = static_cast<decltype(Task::kind)>(below(Task::kNumKinds));
    const bool may_differ = kind != Task::kBarrier && kind != Task::kTwoSums && kind != Task::kStarted;
    tasks.push_back({kind,
                     1 + below(static_cast<uint32_t>(most)),
                     below(n),
                     may_differ && below(8) == 0 ? below(n) : UINT32_MAX,
                     {},
                     static_cast<uint32_t>(k)});
    const bool several = kind == Task::kBroadcast && below(2) == 0;
    for (uint32_t r = 0; several && r < n; r++) {
      if (r == tasks.back().root || below(2) == 0) tasks.back().sources.push_back(r);
    }
  }
  const uint32_t pace = 1 + below(most > 1000 ? 40000 : 8000);  // microseconds
  std::vector<Loss> losses;
  for (uint32_t r = 0; r < n; r++) losses.push_back({r, UINT32_MAX});
  for (uint32_t h = 0; lose_hosts && h < num_hosts; h++) losses.push_back({UINT32_MAX, h});
  std::shuffle(losses.begin(), losses.end(), random);
  std::vector<bool> lives(n, true), there(num_hosts, true);
  size_t kept = 0;
  for (const Loss& loss : losses) {  // as long as a host is left
    auto after = lives;
    for (uint32_t r = 0; r < n; r++) {
      if (r == loss.rank || cluster.places().HostOf(r) == loss.host) after[r] = false;
    }
    const bool news = loss.rank == UINT32_MAX || lives[loss.rank];
    if (!news || std::count(after.begin(), after.end(), true) == 0 || (kept > 0 && below(3) == 0)) continue;
    lives = after;
    if (loss.host != UINT32_MAX) there[loss.host] = false;
    losses[kept++] = loss;
  }
  losses.resize(kept);
  std::vector<std::vector<uint32_t>> delays;  // by loss, by host: since the one before
  for (size_t d = 0; d < losses.size(); d++) {
    delays.emplace_back();
    const uint32_t since = below(pace);
    for (uint32_t h = 0; h < num_hosts; h++) delays[d].push_back(since + below(2000));
  }
  std::vector<std::atomic<bool>> stops(n), stopped(n);
  std::vector<std::thread> launchers;
  for (uint32_t h = 0; h < num_hosts; h++) {
    launchers.emplace_back([&, h] {
      std::vector<bool> failed_ranks(n);
      for (size_t d = 0; d < losses.size(); d++) {
        std::this_thread::sleep_for(microseconds(delays[d][h]));
        for (uint32_t r = 0; r < n; r++) {
          if (failed_ranks[r] || (r != losses[d].rank && cluster.places().HostOf(r) != losses[d].host)) continue;
          failed_ranks[r] = true;
          stops[r] = true;
          while (kGently && !stopped[r]) std::this_thread::sleep_for(microseconds(100));
          cluster.MarkLost(h, r);
        }
        if (losses[d].host == UINT32_MAX) continue;
        if (losses[d].host == h) return cluster.End(h);
        cluster.transport(h).LoseHost(losses[d].host);
      }
    });
  }
  std::vector<std::vector<Seen>> seen(n);
  const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
    const struct Last {
      ~Last() { stopped = true; }
      std::atomic<bool>& stopped;
    } last{stopped[rank]};
    Background background;
    const std::shared_ptr<Communicator> shared(&c, [](Communicator*) {});
    for (const Task& task : tasks) {
      if (kGently && stops[rank]) return;
      seen[rank].push_back(task.kind == Task::kStarted ? DoStarted(task, rank, shared, background) : Do(task, rank, c));
    }
  });
  for (std::thread& launcher : launchers) launcher.join();
  const auto survivor = static_cast<uint32_t>(std::find(lives.begin(), lives.end(), true) - lives.begin());
  for (uint32_t r = 0; r < n; r++) {
    if (lives[r]) {
      ASSERT_FALSE(errors[r]) << "rank " << r << ": " << ErrorOf(errors[r]).what();
    }
    for (size_t k = 0; k < seen[r].size(); k++) {
      Seen& its = seen[r][k];
      const Seen& ours = seen[survivor][k];
      if (!lives[r] && k + 1 == seen[r].size()) {  // what it read last others may have written over: see kGently
        its.out = ours.out;
        its.wrong.clear();
      }
      // Of two hosts the one that is lost may have come to something that no other has, and a mismatch among its own
      // ranks goes with it.
      if (!there[cluster.places().HostOf(r)] && (num_hosts == 2 || its.failed)) break;
      ASSERT_TRUE(its == ours) << "rank " << r << ", operation " << k << " of kind " << tasks[k].kind << ": failed "
                               << its.failed << " and " << ours.failed << ", generation " << its.generation << " and "
                               << ours.generation;
      ASSERT_EQ(its.wrong, "") << "rank " << r << ", operation " << k << ", generation " << its.generation;
    }
  }
}

TEST(ClusterFailures, SurvivorsOfAllHostsComeToTheSameEnd) {
  std::mt19937 random(Seed());
  for (int i = 0; i < static_cast<int>((Everywhere() ? 400 : 40) / kSlower); i++) {
    LiveAndFail(kLayouts[random() % kLayouts.size()], random, /*lose_hosts=*/false);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(ClusterFailures, SurvivorsComeToTheSameEndWhereHostsAreLost) {
  std::mt19937 random(Seed());
  for (int i = 0; i < static_cast<int>((Everywhere() ? 400 : 40) / kSlower); i++) {
    LiveAndFail(kLayouts[random() % kLayouts.size()], random, /*lose_hosts=*/true);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(ClusterFailures, BroadcastFromAFailedRankFailsAtAllAndBreaksNothing) {
  Clusters cluster({0, 1, 1}, /*recovers=*/true);
  for (const uint32_t root : {2U, 0U}) {  // one of two on its host, and the last of its host
    const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
      if (root == 0 && rank == 2) return;
      if (rank == root) return cluster.MarkLost(root);
      float x = 0;
      c.Run(Op(Kind::kBroadcast, "from the dead", {{&x, &x, 1}}, KF_FLOAT32, KF_SUM, root));
    });
    EXPECT_EQ(ErrorOf(errors[1]).status(), KF_PEER_LOST);
    if (root == 2) {
      EXPECT_EQ(ErrorOf(errors[0]).status(), KF_PEER_LOST);
    }
    cluster.Run([&](uint32_t rank, Communicator& c) {
      if (rank == 1 || (rank == 0 && root == 2)) Sum(c, "and on", 1, root == 2 ? 2 : 1);
    });
  }
}

TEST(ClusterFailures, BroadcastFromAFailedSourceFailsAndAnotherSourceServes) {
  Clusters cluster({0, 1, 1, 2}, /*recovers=*/true);
  const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
    if (rank == 1) return cluster.MarkLost(1);
    c.SetSources({0, 1});
    float x = 0;
    c.Run(Op(Kind::kBroadcast, "given", {{&x, &x, 1}}, KF_FLOAT32));
  });
  for (const uint32_t r : {0U, 2U, 3U}) EXPECT_EQ(ErrorOf(errors[r]).status(), KF_PEER_LOST);
  cluster.Run([&](uint32_t rank, Communicator& c) {
    if (rank == 1) return;
    c.SetSources({0, 2});
    float x = rank == 3 ? 0 : 7;
    c.Run(Op(Kind::kBroadcast, "given", {{&x, &x, 1}}, KF_FLOAT32));
    EXPECT_EQ(x, 7);
  });
}

TEST(ClusterFailures, WithoutRecoveryAllFail) {
  Clusters cluster({0, 1, 1});
  const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
    if (rank == 2) {
      cluster.MarkLost(1, 2, /*recover=*/false);
      return;
    }
    Sum(c, "x", 1, 3);
  });
  for (const uint32_t r : {0U, 1U}) {
    EXPECT_EQ(ErrorOf(errors[r]).status(), KF_PEER_LOST);
    EXPECT_NE(std::string(ErrorOf(errors[r]).what()).find("rank 2"), std::string::npos) << ErrorOf(errors[r]).what();
  }
}

TEST(ClusterEnds, RankThatHasLeftIsNamed) {
  Clusters cluster({0, 1, 1});
  const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
    Sum(c, "x", 1, 3);
    if (rank != 0) return c.Leave();
    Sum(c, "x", 1, 3);
  });
  EXPECT_EQ(ErrorOf(errors[0]).status(), KF_PEER_LOST);
  EXPECT_NE(std::string(ErrorOf(errors[0]).what()).find("has finished and left"), std::string::npos)
      << ErrorOf(errors[0]).what();
}

TEST(ClusterEnds, RankThatEndsWithoutLeavingIsNamed) {
  for (const bool recovers : {false, true}) {
    Clusters cluster({0, 1, 1}, recovers);
    const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
      Sum(c, "x", 1, 3);
      if (rank == 0) return Sum(c, "x", 1, 3);
      for (uint32_t h = 0; h < 2; h++) cluster.MarkLost(h, rank, /*recover=*/false);
    });
    const Error error = ErrorOf(errors[0]);
    EXPECT_EQ(error.status(), KF_PEER_LOST);
    EXPECT_NE(std::string(error.what()).find("was killed"), std::string::npos) << error.what();
  }
}

TEST(ClusterEnds, AHostThatIsLostIsNamed) {
  Clusters cluster({0, 0, 1, 2});
  const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
    Sum(c, "x", 1, 4);
    if (rank == 3) return cluster.End(2);
    Sum(c, "x", 1, 4);
  });
  for (const uint32_t r : {0U, 1U, 2U}) {
    EXPECT_EQ(ErrorOf(errors[r]).status(), KF_PEER_LOST);
    EXPECT_NE(std::string(ErrorOf(errors[r]).what()).find(HostName(2)), std::string::npos) << ErrorOf(errors[r]).what();
  }
  EXPECT_NE(cluster.transport(0).failure(), "");
}

TEST(ClusterEnds, RankThatGivesUpEndsTheWaitsOnOtherHosts) {
  Clusters cluster({0, 1, 1}, false, {std::chrono::milliseconds(300), std::chrono::seconds(60)});
  const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
    if (rank == 1) return;
    if (rank == 0) c.SetBusy(true);
    Sum(c, "x", 1, 3);
  });
  EXPECT_EQ(ErrorOf(errors[2]).status(), KF_TIMEOUT) << ErrorOf(errors[2]).what();
  EXPECT_EQ(ErrorOf(errors[0]).status(), KF_TIMEOUT) << ErrorOf(errors[0]).what();
}

// The launcher of a host waits for the job's store, and the other ranks come after its ranks' limit.
TEST(ClusterEnds, NoDeadlineRunsWhileTheyAreHeld) {
  Clusters cluster({0, 0, 1}, false, {std::chrono::milliseconds(300), std::chrono::seconds(60)});
  for (const uint32_t host : {0U, 1U}) cluster.segment(host).header().deadlines_held = 1;
  cluster.Run([&](uint32_t rank, Communicator& c) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(900));
    Sum(c, "late", 1, 3);
  });
}

// By what its caller asked for, and what it waits for: the rank where that is on the same host, else the hosts.
// Returns what the waits that have taken `timeout` have said meanwhile.
std::string WaitTooLong(bool here, std::chrono::seconds timeout) {
  Clusters cluster({0, 0, 1, 1, 2}, false, {timeout, std::chrono::seconds(60), std::chrono::milliseconds(50)});
  ::testing::internal::CaptureStderr();
  const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
    Sum(c, "late", 1, 5);  // it isn't the first of its name
    if (rank == 2 || rank == 4) return;
    if ((rank == 3) != here) c.SetBusy(true);  // so that it doesn't give up before the other
    Sum(c, "late", 1, 5);
  });
  const std::string whom = here ? "rank 2 (" + HostName(1) + ":10002)"
                                : "host " + HostName(1) + " (ranks 2, 3) and host " + HostName(2) + " (rank 4)";
  std::string log = ::testing::internal::GetCapturedStderr();
  for (const uint32_t r : {0U, 1U, 3U}) {
    const std::string text = ErrorOf(errors[r]).what();
    EXPECT_EQ(ErrorOf(errors[r]).status(), KF_TIMEOUT) << text;
    const std::string within = " within " + std::to_string(timeout.count()) + " s";
    EXPECT_NE(text.find("all_reduce \"late\": no data from " + whom + within), std::string::npos) << text;
  }
  return log;
}

TEST(ClusterEnds, AWaitThatTakesTooLongIsNamed) {
  for (const bool here : {true, false}) {
    // There is one line a second. On a busy machine it may be of a wait of another kind, and the others are left out:
    // in a longer time there are more of them.
    bool named = false;
    std::string log;
    for (int timeout = 1; !named && timeout <= 4; timeout *= 2) {
      log = WaitTooLong(here, std::chrono::seconds(timeout));
      named = log.find(" s for host " + HostName(1)) != std::string::npos ||
              log.find(" s for rank 2 ") != std::string::npos;
    }
    EXPECT_TRUE(named) << log;
  }
}

// What can't be carried out is refused, and brings down nothing but this communicator.
TEST(ClusterEnds, ARequestThatIsNoneEndsTheCommunicator) {
  hosts::Request request;
  request.kind = Kind::kAllReduce;
  request.dtype = KF_FLOAT32;
  request.count = 4;
  request.signature = 1;
  request.name = "x";
  std::vector<std::vector<char>> refused = {{'h', 'e', 'l', 'l', 'o'}};
  const auto with = [&](const auto& change) {
    hosts::Request changed = request;
    change(changed);
    refused.push_back(changed.Packed());
  };
  const auto planes = [](hosts::Request& r, std::vector<uint32_t> of_rank, std::vector<int32_t> program) {
    r.has_planes = true;
    r.planes.of_rank = std::move(of_rank);
    r.planes.most = r.planes.of_rank[0];
    r.planes.program = std::move(program);
  };
  with([](auto& r) { r.name = ""; });
  with([](auto& r) { r.root = 2; });
  with([](auto& r) { r.track = hosts::kTracks; });
  with([](auto& r) { r.count = uint64_t{1} << 62; });
  with([](auto&) {});
  refused.back()[5] = 99;  // a dtype that there isn't
  with([](auto&) {});
  refused.back()[6] = 99;                                 // a reduction that there isn't
  with([&](auto& r) { planes(r, {100000, 0}, {0}); });    // more than there can be
  with([&](auto& r) { planes(r, {1, 2}, {0}); });         // more than it says
  with([&](auto& r) { planes(r, {1}, {0}); });            // of another cluster
  with([&](auto& r) { planes(r, {1, 1}, {0, 2, -1}); });  // a plane that there isn't
  with([&](auto& r) { planes(r, {1, 1}, {0, -1}); });     // nothing to add
  with([&](auto& r) { planes(r, {1, 1}, {0, 1}); });      // two results
  with([&](auto& r) { r.kind = Kind::kBarrier, planes(r, {1, 1}, {0, 1, -1}); });
  for (const std::vector<char>& bytes : refused) {
    Clusters cluster({0, 1});
    const int stranger = cluster.transport(0).Connect(0);
    ASSERT_GT(write(stranger, bytes.data(), bytes.size()), 0);
    close(stranger);
    const auto errors = cluster.Collect([&](uint32_t, Communicator& c) {
      for (int i = 0; i < 100000; i++) Sum(c, "y", 1, 2);
    });
    for (const auto& error : errors) EXPECT_EQ(ErrorOf(error).status(), KF_INTERNAL) << ErrorOf(error).what();
  }
}

TEST(ClusterEnds, FailureAfterTheEndOfItsRanksReachesTheOthers) {
  Clusters cluster({0, 1}, /*recovers=*/true);
  const auto errors = cluster.Collect([&](uint32_t rank, Communicator& c) {
    if (rank == 1) {
      cluster.MarkLost(1);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // its transport has said so
      return cluster.transport(1).Fail(KF_INTERNAL, "a reason");
    }
    for (int i = 0; i < 100000; i++) c.Run({Kind::kBarrier, "barrier"});
  });
  EXPECT_EQ(std::string(ErrorOf(errors[0]).what()), "a reason");
}

TEST(Cluster, ANameThatIsTooLongIsRefusedAndBreaksNothing) {
  Clusters cluster({0, 1}, /*recovers=*/true);
  const std::string name(100 << 10, 'x');
  cluster.Run([&](uint32_t, Communicator& c) {
    EXPECT_THROW(c.Run({Kind::kBarrier, name.c_str()}), Error);
    Sum(c, name.substr(0, 60 << 10).c_str(), 1, 2);
  });
}

}  // namespace
}  // namespace kungfu::testing
