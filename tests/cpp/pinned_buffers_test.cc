// Staging buffers that the ranks of a host and their transport keep while hosts exchange what is in them
// (staging_buffers.cc, 12).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/fault_point.h"
#include "clusters.h"
#include "ranks.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;

// One rank a host, several, and both.
const std::vector<std::vector<uint32_t>> kSomeHosts = {{0, 1}, {0, 0, 1, 1}, {0, 0, 1, 2}};

// Sums `count` numbers that each rank brings, and says how many came out right.
size_t RightSums(Communicator& c, uint32_t rank, uint32_t ranks, const std::string& name, size_t count, int salt) {
  std::vector<float> in(count), out(count);
  for (size_t i = 0; i < count; i++) in[i] = static_cast<float>((rank + 1) * (i % 97 + static_cast<size_t>(salt)));
  c.Run(Op(Kind::kAllReduce, name.c_str(), {{in.data(), out.data(), count}}, KF_FLOAT32, KF_SUM));
  size_t right = 0;
  for (size_t i = 0; i < count; i++) {
    const size_t sum = ranks * (ranks + 1) / 2 * (i % 97 + static_cast<size_t>(salt));
    right += out[i] == static_cast<float>(sum) ? 1 : 0;
  }
  return right;
}

// A transport may leave its staging buffers a moment later than the ranks.
bool AllStagingBuffersAreFree(Clusters& cluster) {
  return Soon([&] {
    uint64_t used = 0;
    for (uint32_t h = 0; h < cluster.places().hosts(); h++) {
      const shm::Header& header = cluster.segment(h).header();
      used |= header.staging_buffers.load() | header.pinned_buffers.load();
    }
    return used == 0;
  });
}

// From what a mailbox carries to what doesn't fit into a staging buffer.
TEST(PinnedBuffers, AreGivenBack) {
  for (const auto& layout : kSomeHosts) {
    Clusters cluster(layout);
    cluster.Run([&](uint32_t rank, Communicator& c) {
      for (const size_t count : {size_t{10}, size_t{11}, size_t{5000}, size_t{65536}, size_t{65537}, size_t{200'000},
                                 size_t{262'144}, size_t{262'145}, size_t{400'000}, size_t{1'000'003}}) {
        for (int round = 0; round < 3; round++) {
          ASSERT_EQ(RightSums(c, rank, cluster.size(), "sum", count, round), count);
        }
      }
    });
    EXPECT_TRUE(AllStagingBuffersAreFree(cluster));
  }
}

// More are in flight than there are staging buffers to keep; the others' go the ordinary way.
TEST(PinnedBuffers, AreNotWaitedFor) {
  constexpr int kNames = shm::kPinnedBuffers + 12;
  for (const auto& layout : kSomeHosts) {
    Clusters cluster(layout);
    cluster.Run([&](uint32_t rank, Communicator& c) {
      std::vector<std::thread> threads;
      for (int name = 0; name < kNames; name++) {
        threads.emplace_back([&, name] {
          for (int round = 0; round < 3; round++) {
            EXPECT_EQ(RightSums(c, rank, cluster.size(), "sum " + std::to_string(name), 30'000, name), 30'000U);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
    EXPECT_TRUE(AllStagingBuffersAreFree(cluster));
    // And where one host has none at all, for good: an ordinary one says by its number that it isn't kept.
    cluster.segment(0).header().pinned_buffers = ~uint64_t{0};
    cluster.Run([&](uint32_t rank, Communicator& c) {
      EXPECT_EQ(RightSums(c, rank, cluster.size(), "sum", 300'000, 1), 300'000U);
    });
  }
}

// A wait for buffers isn't a wait for other hosts: host 0 has begun more sums than there are staging buffers when it
// gathers something, which the other one does first.
TEST(PinnedBuffers, LeaveBuffersFreeWhileOtherHostsAreAwaited) {
  constexpr int kNames = shm::kStagingBuffers + shm::kPinnedBuffers + 8;
  for (const size_t count : {size_t{5}, size_t{10}, size_t{5000}}) {
    Clusters cluster({0, 1}, /*recovers=*/false, {30s, 30s});
    cluster.Run([&](uint32_t rank, Communicator& c) {
      std::vector<std::thread> threads;
      const auto sum = [&] {
        for (int name = 0; name < kNames; name++) {
          threads.emplace_back([&, name] {
            EXPECT_NO_THROW(EXPECT_EQ(RightSums(c, rank, 2, "sum " + std::to_string(name), count, name), count));
          });
        }
      };
      if (rank == 0) sum();
      if (rank == 0) std::this_thread::sleep_for(300ms);
      const std::vector<float> in(5000, static_cast<float>(rank));
      std::vector<float> out(10'000);
      EXPECT_NO_THROW(c.Run(Op(Kind::kAllGather, "all", {{in.data(), out.data(), in.size()}}, KF_FLOAT32)));
      if (rank == 1) sum();
      for (std::thread& thread : threads) thread.join();
    });
    EXPECT_TRUE(AllStagingBuffersAreFree(cluster));
  }
}

TEST(PinnedBuffers, AreGivenBackByTheMembersThatAreLeft) {
  Clusters cluster({0, 0, 0, 1}, /*recovers=*/true);
  cluster.MarkLost(1);
  cluster.Run([&](uint32_t rank, Communicator& c) {
    if (rank == 1) return;
    for (int round = 0; round < 3; round++) {
      std::vector<float> x(50'000, 1);
      c.Run(Op(Kind::kAllReduce, "sum", {{x.data(), x.data(), x.size()}}, KF_FLOAT32));
      EXPECT_EQ(x.back(), 3);
    }
  });
  EXPECT_TRUE(AllStagingBuffersAreFree(cluster));
}

TEST(PinnedBuffers, HaveFencedWordsOfFailedRanks) {
  Clusters cluster({0, 0, 1}, /*recovers=*/true);
  cluster.MarkLost(0, 1);
  const shm::Segment& segment = cluster.segment(0);
  for (uint32_t staging_buffer = 0; staging_buffer < shm::kStagingBuffers + shm::kPinnedBuffers; staging_buffer++) {
    for (shm::Counter* const word :
         {&segment.ready(staging_buffer, 1), &segment.reduced(staging_buffer, 1), &segment.done(staging_buffer, 1)}) {
      EXPECT_NE(word->value.load() & shm::Counter::kFence, 0U) << staging_buffer;
    }
  }
}

constexpr int kLateRounds = 8;
thread_local bool is_late = false;
std::atomic<int> times_late{0}, threads_over{0};

// A rank that reads the result late finds it where it was, whatever goes through the staging buffers meanwhile.
TEST(PinnedBuffers, WaitForALateReader) {
  times_late = threads_over = 0;
  fault_hook = [](const char* place) {
    if (!is_late || std::strcmp(place, "before it reads in a pinned buffer") != 0) return;
    // The last time they are late until the threads with many names have come through.
    if (times_late++ >= 2 * (kLateRounds - 1)) EXPECT_TRUE(Soon([] { return threads_over == 4; }));
    std::this_thread::sleep_for(30ms);
  };
  {
    Clusters cluster({0, 0, 1, 1});
    cluster.Run([&](uint32_t rank, Communicator& c) {
      std::vector<std::thread> threads;
      threads.emplace_back([&] {
        is_late = rank % 2 == 0;
        for (int round = 0; round < kLateRounds; round++) {
          EXPECT_EQ(RightSums(c, rank, cluster.size(), "late", 50'000, round), 50'000U);
        }
      });
      for (int name = 0; name < 3; name++) {
        threads.emplace_back([&, name] {
          for (int round = 0; round < 100; round++) {
            EXPECT_EQ(RightSums(c, rank, cluster.size(), "soon " + std::to_string(name), 50'000, 100 + round), 50'000U);
          }
        });
      }
      // More names than can be bound at a time: those that keep a staging buffer stay bound.
      threads.emplace_back([&] {
        EXPECT_TRUE(Soon([] { return times_late > 2 * (kLateRounds - 1); }));
        for (int name = 0; name < 400; name++) {
          EXPECT_EQ(RightSums(c, rank, cluster.size(), "once " + std::to_string(name), 5'000, name), 5'000U);
        }
        threads_over++;
      });
      for (std::thread& thread : threads) thread.join();
    });
    EXPECT_TRUE(AllStagingBuffersAreFree(cluster));
  }
  fault_hook = nullptr;
  EXPECT_EQ(times_late, 2 * kLateRounds);
}

}  // namespace
}  // namespace kungfu::testing
