// Operations under many names: order, concurrency, the channel table.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <random>

#include "base/log.h"
#include "ranks.h"
#include "runtime/peer.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

TEST(Names, InOppositeOrderOnTwoThreadsDoNotBlockEachOther) {
  Ranks ranks(2);
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    std::thread other([&] {
      for (int i = 0; i < 300; i++) Sum(communicator, rank == 0 ? "a" : "b", 1, 2, rank == 0 ? 1 : 70000);
    });
    for (int i = 0; i < 300; i++) Sum(communicator, rank == 0 ? "b" : "a", 1, 2, rank == 0 ? 70000 : 1);
    other.join();
  });
}

TEST(Names, AStalledOneDoesNotStarveAnother) {
  Ranks ranks(2);
  std::atomic<bool> others_done{false};
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    std::thread stalled([&] {
      // Rank 1 comes to "stalled" only after a hundred operations of "busy" went through.
      while (rank == 1 && !others_done) std::this_thread::yield();
      Sum(communicator, "stalled", 1, 2, 200000);
    });
    for (int i = 0; i < 100; i++) Sum(communicator, "busy", 1, 2, 200000);
    if (rank == 1) others_done = true;
    stalled.join();
  });
}

TEST(Names, MoreThanTheTableHoldsOverTime) {
  for (const uint32_t size : {2u, 3u}) {
    Ranks ranks(size);
    ranks.Run([&](uint32_t rank, Communicator& communicator) {
      for (int i = 0; i < 3 * static_cast<int>(shm::kChannels); i++) {
        Sum(communicator, ("name/" + std::to_string(i)).c_str(), float(i), float(i * int(size)), i % 50 == 0 ? 100 : 1);
        if (i % 100 == 0) Sum(communicator, "constant", 1, float(size));
        // At times one rank gives its names back earlier than the others.
        if (rank == 0 && i == 1000) std::this_thread::sleep_for(5ms);
      }
    });
  }
}

TEST(Names, OneNameServesEveryKindInTurn) {
  Ranks ranks(3);
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    for (int i = 0; i < 50; i++) {
      Sum(communicator, "unnamed", float(rank), 3, 1 + i * 1000);
      float x = float(rank), gathered[3];
      communicator.Run(Op(Kind::kAllGather, "unnamed", {{&x, gathered, 1}}, KF_FLOAT32));
      ASSERT_EQ(gathered[2], 2);
      communicator.Run(Op(Kind::kBroadcast, "unnamed", {{&x, &x, 1}}, KF_FLOAT32, KF_SUM, i % 3));
      ASSERT_EQ(x, i % 3);
      communicator.Run(Op(Kind::kBarrier, "unnamed", {}, KF_UINT8));
    }
  });
}

TEST(Names, AnEmptyOneIsRefused) {
  Ranks ranks(1);
  EXPECT_THROW(ranks.at(0).Run(Op(Kind::kBarrier, "", {}, KF_UINT8)), Error);
}

// Threads per rank that take names in an order of their own, each name with operations of its own sizes.
TEST(Names, RandomSchedulesGiveRightSums) {
  for (unsigned seed = 0; seed < 20; seed++) {
    SCOPED_TRACE(seed);
    const uint32_t size = 2 + seed % 3;
    Ranks ranks(size);
    ranks.Run([&](uint32_t rank, Communicator& communicator) {
      std::vector<std::thread> threads;
      for (int name = 0; name < 4; name++) {
        threads.emplace_back([&, name] {
          std::mt19937 sizes(seed * 100 + name), pauses(seed * 1000 + name * 10 + rank);
          for (int i = 0; i < 30; i++) {
            const size_t count = sizes() % 3 == 0 ? sizes() % 200000 : sizes() % 20;
            if (pauses() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(pauses() % 300));
            Sum(communicator, ("t" + std::to_string(name)).c_str(), float(rank + 1), float(size * (size + 1) / 2),
                count);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
  }
}

// More than there are staging buffers: the rest waits for one.
TEST(Names, AnyNumberOfLargeOperationsMayBeInFlight) {
  Ranks ranks(2);
  ranks.Run([&](uint32_t, Communicator& communicator) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 100; i++) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < 3; round++) Sum(communicator, ("n" + std::to_string(i)).c_str(), 1, 2, 40000);
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(Names, DeadlineReportsThatAllStagingBuffersAreTaken) {
  Ranks ranks(2, {200ms, 10s});
  ranks.segment().header().staging_buffers = ~uint64_t{0};
  const auto errors = ranks.Collect([&](uint32_t, Communicator& communicator) { Sum(communicator, "x", 1, 2, 40000); });
  EXPECT_EQ(ErrorOf(errors[0]).status(), KF_TIMEOUT);
  EXPECT_EQ(ErrorOf(errors[1]).status(), KF_TIMEOUT);
  EXPECT_NE(std::string(ErrorOf(errors[0]).what()).find("64 operations with a staging buffer"), std::string::npos)
      << ErrorOf(errors[0]).what();
}

TEST(Names, WhereTheTableIsFullTheOthersFollow) {
  Ranks ranks(2, {10s, 10s});
  for (uint32_t c = 0; c < shm::kChannels; c++) ranks.segment().channel(c).SetUser(200);
  const auto begin = Clock::now();
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    if (rank == 1) {
      while (ranks.segment().channel(3).IsBound()) std::this_thread::yield();
      Sum(communicator, "x", 1, 2);
      return;
    }
    try {
      Sum(communicator, "x", 1, 2);
    } catch (...) {
      ranks.segment().channel(3).ClearUser(200);
      throw;
    }
  });
  EXPECT_EQ(ErrorOf(errors[0]).status(), KF_INVALID);
  EXPECT_EQ(ErrorOf(errors[1]).status(), KF_ABORTED) << ErrorOf(errors[1]).what();
  EXPECT_LT(Clock::now() - begin, 5s);
}

// Counters wrap; complaints, which are rare, must not come to look as if they had been made.
TEST(Names, GoOnForeverWithoutLookingLikeAMismatch) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  shm::Segment& segment = ranks.segment();
  ranks.Run([&](uint32_t, Communicator& communicator) { Sum(communicator, "x", 1, 3); });
  segment.channel(0).SetUser(200);  // keeps it while every rank gives the name back
  ranks.Run([&](uint32_t, Communicator& communicator) {
    for (int i = 0; i < 600; i++) Sum(communicator, ("other" + std::to_string(i)).c_str(), 1, 3);
  });
  uint32_t sequence = (1u << 28) - 2;
  for (int leap = 0; leap < 3; leap++, sequence += 1u << 28) {
    for (uint32_t r = 0; r < 3; r++) segment.mailbox(0, r, sequence).sequence.value = sequence & shm::Counter::kMask;
    ranks.Run([&](uint32_t, Communicator& communicator) {
      for (int i = 0; i < 4; i++) Sum(communicator, "x", 1, 3);
      for (int i = 0; i < 600; i++) Sum(communicator, ("other" + std::to_string(i)).c_str(), 1, 3);
    });
  }
  EXPECT_TRUE(segment.mailbox(0, 0, sequence).sequence.Reached((sequence - (1u << 28) + 4) & shm::Counter::kMask));
  ranks.control().MarkLost(2, "was killed by SIGKILL", /*recover=*/true, /*reaped=*/true);
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    if (rank != 2) Sum(communicator, "x", 1, 2);  // and not 3: it has not come to this one
  });
  EXPECT_FALSE(errors[0]) << ErrorOf(errors[0]).what();
  EXPECT_FALSE(errors[1]) << ErrorOf(errors[1]).what();
}

TEST(Names, TensorsSizedForAnotherClusterAreRefusedBeforeAWrite) {
  Ranks ranks(3);
  std::vector<float> x(4, 1), all(8, -1);
  const std::vector<kf_tensor> tensors{{x.data(), all.data(), 4}};
  Operation gather = Op(Kind::kAllGather, "g", tensors, KF_FLOAT32);
  gather.sized_for_ranks = 2;
  try {
    ranks.at(0).Run(gather);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), KF_STALE);
    EXPECT_STREQ(error.what(), "all_gather \"g\": its tensors are sized for 2 ranks, but the cluster has 3 now");
  }
  EXPECT_EQ(all, std::vector<float>(8, -1));
  ranks.Run([](uint32_t, Communicator& communicator) { Sum(communicator, "g", 1, 3); });
}

}  // namespace
}  // namespace kungfu::testing
