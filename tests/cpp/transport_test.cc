// What a host's transport keeps of operations: its memory, and the host it names while a loss waits to be recorded.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "clusters.h"
#include "collectives/hosts/scratch.h"
#include "ranks.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using hosts::ScratchPool;

// An operation of so many bytes that brings, exchanges and gives as many.
void Fill(hosts::Scratch& scratch, size_t bytes) {
  scratch.contribution.Get(bytes);
  scratch.result.Get(bytes);
  scratch.other.Get(bytes);
}

TEST(ScratchPool, GivesAnOperationTheMemoryOfTheOneBefore) {
  ScratchPool pool;
  char* first = nullptr;
  for (int i = 0; i < 3; i++) {
    const ScratchPool::Use use(pool, 100 << 20);
    char* const memory = (*use).contribution.Get(100 << 20);
    if (first == nullptr) first = memory;
    EXPECT_EQ(memory, first);
  }
  EXPECT_EQ(pool.idle_bytes(), size_t{100} << 20);  // what was used last is kept, however large
}

TEST(ScratchPool, KeepsLittleOfManyOperationsAtATime) {
  ScratchPool pool;
  constexpr size_t kLarge = 32 << 20;
  {
    std::vector<std::unique_ptr<ScratchPool::Use>> uses;
    for (int i = 0; i < 16; i++) {
      uses.push_back(std::make_unique<ScratchPool::Use>(pool, kLarge));
      (**uses.back()).contribution.Get(kLarge);
    }
  }
  EXPECT_LE(pool.idle_bytes(), ScratchPool::kMostIdle + kLarge);
}

// Sixteen names at a time, and large operations one after another: no small one holds what a large one has taken.
TEST(ScratchPool, GivesNoLargeMemoryToASmallOperation) {
  ScratchPool pool;
  constexpr size_t kLarge = 16 << 20;
  std::minstd_rand random(1);
  for (int round = 0; round < 50; round++) {
    std::vector<std::unique_ptr<ScratchPool::Use>> uses;
    size_t held = 0;
    const int large = static_cast<int>(random() % 16);
    for (int i = 0; i < 16; i++) {
      const size_t bytes = i == large ? kLarge : 1000;
      uses.push_back(std::make_unique<ScratchPool::Use>(pool, bytes));
      Fill(**uses.back(), bytes);
      held += (**uses.back()).bytes();
    }
    ASSERT_LT(held, 4 * kLarge);
    ASSERT_LT(held + pool.idle_bytes(), ScratchPool::kMostIdle + 4 * kLarge);
  }
}

// As many names at a time as a launcher has threads for: what they have worked in stays within the pool's bound.
TEST(TransportMemory, IsThePoolsWhenOperationsHaveEnded) {
  Clusters cluster({0, 0, 1, 1});
  constexpr size_t kBytes = 1 << 20;
  cluster.Run([&](uint32_t rank, ClusterCommunicator& communicator) {
    CollectOf(8, [&](uint32_t n) {
      std::vector<char> model(kBytes, rank == 0 ? 'a' : 'b');
      const std::string name = "model " + std::to_string(n);
      communicator.Run(Op(Kind::kBroadcast, name.c_str(), {{model.data(), model.data(), kBytes}}, KF_UINT8, KF_SUM, 0));
      EXPECT_EQ(model, std::vector<char>(kBytes, 'a'));
    });
  });
  for (const uint32_t h : {0, 1}) {
    EXPECT_TRUE(Soon([&] { return cluster.transport(h).idle_bytes() >= kBytes; })) << h;
    EXPECT_LE(cluster.transport(h).idle_bytes(), ScratchPool::kMostIdle + kBytes) << h;
  }
}

// Rank 0 waits for rank 1, the host of rank 2 is lost, and rank 1 comes: both wait until the job knows of the loss.
TEST(TransportNamesAsAwaited, IsTheLostHostWhileItsLossWaitsToBeRecorded) {
  Clusters cluster({0, 1, 2}, /*recovers=*/true, {3s, 60s});
  std::vector<Error> ends(2, Error(KF_OK, ""));
  const auto reduce = [&](uint32_t rank) {
    try {
      Sum(cluster.at(rank), "x", 1, 2);
    } catch (const Error& error) {
      ends[rank] = error;
    }
  };
  std::thread zero([&] { reduce(0); });
  std::this_thread::sleep_for(100ms);  // its transport has noted that it waits for host 1
  cluster.End(2);
  for (const uint32_t h : {0, 1}) ASSERT_TRUE(Soon([&] { return !cluster.transport(h).Unreachable().empty(); }));
  std::thread one([&] { reduce(1); });
  zero.join();
  one.join();
  for (const Error& end : ends) {
    const std::string text = end.what();
    EXPECT_EQ(end.status(), KF_TIMEOUT) << text;
    EXPECT_NE(text.find("no data from host 10.0.0.3 (rank 2)"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace kungfu::testing
