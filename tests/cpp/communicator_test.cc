// Behaviour: names, order, concurrency, mismatches, deadlines, death.
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

void Sum(Communicator& communicator, const char* name, float value, float expected, size_t count = 1) {
  std::vector<float> x(count, value), y(count);
  communicator.Run(Op(Kind::kAllReduce, name, {{x.data(), y.data(), count}}, KF_FLOAT32));
  ASSERT_EQ(y, std::vector<float>(count, expected)) << name;
}

// ---- names ----

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

// More than there are lanes: the rest waits for one.
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

TEST(Names, WhereAllLanesAreTakenForGoodTheDeadlineSaysSo) {
  Ranks ranks(2, {200ms, 10s});
  ranks.segment().header().lanes = ~uint64_t{0};
  const auto errors = ranks.Collect([&](uint32_t, Communicator& communicator) { Sum(communicator, "x", 1, 2, 40000); });
  EXPECT_EQ(ErrorOf(errors[0]).status(), KF_TIMEOUT);
  EXPECT_EQ(ErrorOf(errors[1]).status(), KF_TIMEOUT);
  EXPECT_NE(std::string(ErrorOf(errors[0]).what()).find("64 operations that need staging"), std::string::npos)
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
  segment.channel(0).SetUser(200);  // keeps it while everybody gives the name back
  ranks.Run([&](uint32_t, Communicator& communicator) {
    for (int i = 0; i < 600; i++) Sum(communicator, ("other" + std::to_string(i)).c_str(), 1, 3);
  });
  uint32_t sequence = (1u << 28) - 2;
  for (int leap = 0; leap < 3; leap++, sequence += 1u << 28) {
    for (uint32_t r = 0; r < 3; r++) segment.post(0, r, sequence).sequence.value = sequence & shm::Counter::kMask;
    ranks.Run([&](uint32_t, Communicator& communicator) {
      for (int i = 0; i < 4; i++) Sum(communicator, "x", 1, 3);
      for (int i = 0; i < 600; i++) Sum(communicator, ("other" + std::to_string(i)).c_str(), 1, 3);
    });
  }
  EXPECT_TRUE(segment.post(0, 0, sequence).sequence.Reached((sequence - (1u << 28) + 4) & shm::Counter::kMask));
  segment.MarkLost(2, "was killed by SIGKILL", /*recover=*/true, /*reaped=*/true);
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    if (rank != 2) Sum(communicator, "x", 1, 2);  // and not 3: it has not come to this one
  });
  EXPECT_FALSE(errors[0]) << ErrorOf(errors[0]).what();
  EXPECT_FALSE(errors[1]) << ErrorOf(errors[1]).what();
}

TEST(Names, WhatWasSizedForAnotherClusterIsRefusedBeforeAnythingIsWritten) {
  Ranks ranks(3);
  std::vector<float> x(4, 1), all(8, -1);
  const std::vector<kf_tensor> tensors{{x.data(), all.data(), 4}};
  Operation gather = Op(Kind::kAllGather, "g", tensors, KF_FLOAT32);
  gather.ranks = 2;
  try {
    ranks.at(0).Run(gather);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), KF_STALE);
    EXPECT_STREQ(error.what(), "all_gather \"g\": its tensors are made for 2 ranks, but there are 3 now");
  }
  EXPECT_EQ(all, std::vector<float>(8, -1));
  ranks.Run([](uint32_t, Communicator& communicator) { Sum(communicator, "g", 1, 3); });
}

// ---- words ----

// Several waiters, each for other counts of one word, whose sleeps would end by themselves only after a minute.
TEST(Counter, LosesNoWakeUp) {
  shm::Counter word{};
  constexpr uint32_t kSteps = 20000;
  std::atomic<uint32_t> seen[3] = {};
  const auto begin = Clock::now();
  std::vector<std::thread> waiters;
  for (uint32_t w = 0; w < 3; w++) {
    waiters.emplace_back([&, w] {
      for (uint32_t target = w + 1; target <= kSteps; target += w + 1) {
        for (;;) {
          const uint32_t armed = word.Arm();
          if (shm::Counter::Reached(armed, target)) break;
          word.Sleep(armed, 60s);
        }
        seen[w] = target;
      }
    });
  }
  for (uint32_t step = 1; step <= kSteps; step++) {
    ASSERT_TRUE(word.Advance(step));
    if (step % 4 == 0) continue;  // sometimes the next step comes at once
    for (uint32_t w = 0; w < 3; w++) {
      while (seen[w] + w < step / (w + 1) * (w + 1)) std::this_thread::yield();
    }
  }
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_LT(Clock::now() - begin, 50s);
}

// What another word says is seen by whoever is stirred after it, or goes to sleep after that.
TEST(Counter, LosesNoNewsOfAnotherWord) {
  shm::Counter word{};
  std::atomic<uint32_t> news{0}, heard{0};
  const auto begin = Clock::now();
  std::thread waiter([&] {
    for (uint32_t next = 1; next <= 20000;) {
      const uint32_t armed = word.Arm();
      if (news.load(std::memory_order_acquire) >= next) {
        heard = next++;
      } else {
        word.Sleep(armed, 60s);
      }
    }
  });
  for (uint32_t next = 1; next <= 20000; next++) {
    news.store(next, std::memory_order_release);
    word.Stir();
    while (heard < next) std::this_thread::yield();
  }
  waiter.join();
  EXPECT_LT(Clock::now() - begin, 50s);
}

TEST(Counter, WrapsAndStaysFenced) {
  shm::Counter word{};
  for (uint32_t at = 0; at < 6u << 28; at += 1u << 28) {
    ASSERT_TRUE(word.Advance(at));
    EXPECT_TRUE(word.Reached(at & shm::Counter::kMask));
    EXPECT_TRUE(word.Reached((at - 5) & shm::Counter::kMask));
    EXPECT_FALSE(word.Reached((at + 1) & shm::Counter::kMask));
  }
  word.Fence();
  EXPECT_FALSE(word.Advance(7));
  word.Clear();
  EXPECT_FALSE(word.Advance(7));
  EXPECT_EQ(word.Count(), 0u);
}

// ---- forked children ----

TEST(Forked, AChildOfAMemberIsRefusedAndTheOthersNoticeNothing) {
  Ranks ranks(2);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    int bad = 0;
    const auto refused = [&](auto call) {
      try {
        call();
        bad++;
      } catch (const Error& error) {
        if (error.status() != KF_INVALID || std::strstr(error.what(), "a forked child is no member") == nullptr) bad++;
      }
    };
    Communicator& mine = ranks.at(0);
    float x = 100, y = 0;
    const kf_tensor tensor{&x, &y, 1};
    const Operation operation{Kind::kAllReduce, "x", &tensor, 1, KF_FLOAT32, KF_SUM, 0, nullptr};
    const Operation both[] = {operation, operation};
    uint32_t generations[] = {0, 1};
    refused([&] { mine.Run(operation); });
    refused([&] { mine.RunAll(both, 2); });
    refused([&] { mine.Settle(both, generations, 2); });
    refused([&] { mine.CallMeeting(1); });
    refused([&] { mine.Assemble(); });
    mine.Beat();
    mine.GiveUp(Error(KF_INTERNAL, "no memory"));
    mine.Close(KF_STALE, "it is a child");
    mine.Leave();
    _exit(bad);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  ranks.Run([](uint32_t rank, Communicator& communicator) { Sum(communicator, "x", float(rank + 1), 3); });
  EXPECT_EQ(ranks.segment().status(0).heartbeat, 0u);
  EXPECT_EQ(ranks.at(0).meetings(), 0u);
  EXPECT_EQ(ranks.segment().header().gave_up, 0u);
}

TEST(Forked, AChildMayAskForItsRankWhateverTheOtherThreadsWereAt) {
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; t++) {
    threads.emplace_back([&] {
      while (!done) (void)Peer::Get().Current()->rank();
    });
  }
  for (int i = 0; i < 200; i++) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      const bool good = Peer::Get().Current()->size() == 1;
      Peer::Get().Reset();
      _exit(good ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    if (HasFailure()) break;
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

// ---- what is told meanwhile ----

TEST(Telling, AWaitSaysForWhomAndInWhat) {
  std::mutex mutex;
  std::condition_variable told;
  std::vector<std::string> lines;  // guarded by mutex
  SetLog([&](const std::string& line) {
    std::lock_guard<std::mutex> guard(mutex);
    lines.push_back(line);
    told.notify_all();
  });
  Ranks ranks(3, {60s, 60s, /*tell_after=*/20ms});
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    if (rank > 0) {
      std::unique_lock<std::mutex> lock(mutex);
      EXPECT_TRUE(told.wait_for(lock, 50s, [&] { return lines.size() >= size_t{rank}; }));
    }
    Sum(communicator, "slow", 1, 3);
  });
  SetLog(nullptr);
  ASSERT_GE(lines.size(), 2u);
  EXPECT_EQ(lines[0],
            "all_reduce \"slow\": rank 0 (127.0.0.1:10000) has waited 0 s for rank 1 (127.0.0.1:10001), rank 2 "
            "(127.0.0.1:10002), cluster version 7");
  EXPECT_NE(lines[1].find(" s for rank 2 (127.0.0.1:10002), cluster version 7"), std::string::npos) << lines[1];
}

// ---- mismatches ----

void ExpectMismatchEverywhere(Ranks& ranks, const std::vector<std::exception_ptr>& errors, const std::string& parts) {
  for (uint32_t r = 0; r < ranks.size(); r++) {
    const Error error = ErrorOf(errors[r]);
    EXPECT_EQ(error.status(), KF_MISMATCH) << "rank " << r << ": " << error.what();
    EXPECT_NE(std::string(error.what()).find(parts), std::string::npos) << error.what();
  }
}

TEST(Mismatch, RaisesAtEveryRankSaysWhoAndTheNextOperationWorks) {
  for (const uint32_t size : {2u, 3u, 4u}) {
    Ranks ranks(size);
    for (int round = 0; round < 20; round++) {
      const size_t large = round % 2 == 0 ? 300000 : 4;
      const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
        std::vector<float> x(large + 1), y(large + 1);
        communicator.Run(Op(Kind::kAllReduce, "w", {{x.data(), y.data(), rank == 1 ? large + 1 : large}}, KF_FLOAT32));
      });
      ExpectMismatchEverywhere(ranks, errors, "rank 1: all_reduce of " + std::to_string(large + 1) + " float32, sum");
      ranks.Run([&](uint32_t rank, Communicator& communicator) {
        Sum(communicator, "w", float(rank), float(size * (size - 1) / 2), 700000);
      });
    }
  }
}

TEST(Mismatch, OfDtypeOpKindRootAndLayoutIsFound) {
  Ranks ranks(2);
  std::vector<double> x(64), y(64);
  const auto differ = [&](const Operation& first, const Operation& second, const std::string& parts) {
    const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
      std::vector<double> in(64), out(64);
      const kf_tensor own{in.data(), out.data(), 8};
      Operation operation = rank == 0 ? first : second;
      operation.tensors = &own;
      operation.num_tensors = 1;
      communicator.Run(operation);
    });
    ExpectMismatchEverywhere(ranks, errors, parts);
  };
  const Operation base = Op(Kind::kAllReduce, "x", {}, KF_FLOAT32);
  Operation other = base;
  other.dtype = KF_INT32;
  differ(base, other, "rank 0: all_reduce of 8 float32, sum; rank 1: all_reduce of 8 int32, sum");
  other = base;
  other.op = KF_MAX;
  differ(base, other, "rank 1: all_reduce of 8 float32, max");
  other = base;
  other.layout = "(2,4)";
  differ(base, other, "rank 1: all_reduce of 8 float32 (2,4), sum");
  other = base;
  other.kind = Kind::kBroadcast;
  Operation second_root = other;
  second_root.root = 1;
  differ(base, other, "rank 1: broadcast of 8 float32, root 0");
  differ(other, second_root, "rank 0: broadcast of 8 float32, root 0; rank 1: broadcast of 8 float32, root 1");
  // A small one that is complete with its post, and one that needs staging.
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    if (rank == 0) {
      communicator.Run(Op(Kind::kBarrier, "x", {}, KF_UINT8));
    } else {
      Sum(communicator, "x", 1, 2, 100000);
    }
  });
  ExpectMismatchEverywhere(ranks, errors, "rank 0: barrier; rank 1: all_reduce of 100000 float32, sum");
}

// ---- deadlines, abort, death ----

TEST(Deadline, NamesOperationRankLimitAndVersionAndTheOthersFollow) {
  Ranks ranks(3, {200ms, 10s});
  const auto begin = Clock::now();
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    if (rank == 2) return;  // does not come
    if (rank == 1) std::this_thread::sleep_for(100ms);
    Sum(communicator, "slow", 1, 3);
  });
  EXPECT_LT(Clock::now() - begin, 5s);
  EXPECT_STREQ(ErrorOf(errors[0]).what(),
               "all_reduce \"slow\": no data from rank 2 (127.0.0.1:10002) within 0.2 s, cluster version 7");
  EXPECT_EQ(ErrorOf(errors[1]).status(), KF_TIMEOUT);
  // The communicator is finished for everyone, also for whoever comes late.
  const auto late = ranks.Collect([&](uint32_t, Communicator& communicator) { Sum(communicator, "late", 1, 3); });
  for (const auto& error : late) EXPECT_EQ(ErrorOf(error).status(), KF_TIMEOUT) << ErrorOf(error).what();
}

TEST(Death, EndsEveryWaitWithTheLaunchersReason) {
  for (const size_t count : {size_t{1}, size_t{3000000}}) {
    Ranks ranks(3);
    Clock::time_point marked;
    const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
      if (rank == 1) {
        std::this_thread::sleep_for(50ms);
        marked = Clock::now();
        ranks.segment().MarkLost(1, "was killed by SIGKILL", /*recover=*/false);
        return;
      }
      Sum(communicator, "doomed", 1, 3, count);
    });
    EXPECT_LT(Clock::now() - marked, 1s);
    for (const uint32_t r : {0u, 2u}) {
      EXPECT_EQ(ErrorOf(errors[r]).status(), KF_PEER_LOST);
      EXPECT_STREQ(ErrorOf(errors[r]).what(),
                   "all_reduce \"doomed\": rank 1 (127.0.0.1:10001) was killed by SIGKILL, cluster version 7");
    }
  }
}

TEST(Death, OfAProcessInTheMiddleOfAnythingLeavesNobodyHanging) {
  for (unsigned seed = 0; seed < 30; seed++) {
    SCOPED_TRACE(seed);
    const int fd = shm::Segment::Create(3, 1, 2);
    std::vector<pid_t> children;
    for (uint32_t rank = 0; rank < 3; rank++) {
      const pid_t pid = fork();
      if (pid == 0) {
        auto segment = std::make_shared<shm::Segment>(fd);
        Communicator communicator(segment, rank, "", false, {20000ms, 20000ms});
        try {
          communicator.Assemble();
          for (int i = 0;; i++) {
            // Many names, so that the table is locked often; small and large in turn.
            const std::string name = "n" + std::to_string(i % 700);
            std::vector<float> x(i % 5 == 0 ? 100000 : 2), y(x.size());
            const kf_tensor tensor{x.data(), y.data(), x.size()};
            communicator.Run({Kind::kAllReduce, name.c_str(), &tensor, 1, KF_FLOAT32, KF_SUM, 0, nullptr});
          }
        } catch (const Error& error) {
          _exit(error.status() == KF_PEER_LOST ? 0 : 1);
        }
      }
      children.push_back(pid);
    }
    std::mt19937 random(seed);
    std::this_thread::sleep_for(std::chrono::microseconds(5000 + random() % 20000));
    const uint32_t victim = random() % 3;
    kill(children[victim], SIGKILL);
    int status = 0;
    waitpid(children[victim], &status, 0);
    shm::Segment segment(fd);
    segment.MarkLost(victim, "was killed by SIGKILL", /*recover=*/false);
    const auto begin = Clock::now();
    for (uint32_t rank = 0; rank < 3; rank++) {
      if (rank == victim) continue;
      waitpid(children[rank], &status, 0);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << " status " << status;
    }
    EXPECT_LT(Clock::now() - begin, 5s);
    close(fd);
  }
}

TEST(Leaving, AfterTheLastOperationIsNoLossAndBeforeItIs) {
  Ranks ranks(2);
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    for (int i = 0; i < 100; i++) Sum(communicator, "last", 1, 2, i * 1000);
    if (rank == 1) {
      communicator.Leave();
      return;
    }
    Sum(communicator, "one too many", 1, 2);
  });
  EXPECT_EQ(ErrorOf(errors[0]).status(), KF_PEER_LOST);
  EXPECT_STREQ(ErrorOf(errors[0]).what(),
               "all_reduce \"one too many\": rank 1 (127.0.0.1:10001) has finished and left, cluster version 7");
  EXPECT_FALSE(errors[1]);
}

TEST(Closing, EndsAnOperationUnderWayAndLaterOnes) {
  Ranks ranks(2);
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    if (rank == 1) return;
    std::thread closer([&] {
      std::this_thread::sleep_for(30ms);
      communicator.Close(KF_STALE, "the cluster is at version 8");
    });
    try {
      Sum(communicator, "x", 1, 2);
    } catch (...) {
      closer.join();
      throw;
    }
  });
  EXPECT_EQ(ErrorOf(errors[0]).status(), KF_STALE);
  EXPECT_STREQ(ErrorOf(errors[0]).what(), "the cluster is at version 8");
  EXPECT_THROW(Sum(ranks.at(0), "x", 1, 2), Error);
  // Whoever closes it tells the others what they are to know.
  EXPECT_EQ(ranks.segment().status(0).gave_up.Count(), 0u);
}

TEST(Assembling, TellsWhoIsMissing) {
  const int fd = shm::Segment::Create(2, 3, 2);
  auto segment = std::make_shared<shm::Segment>(fd);
  close(fd);
  Communicator communicator(segment, 0, "", false, {1s, 100ms});
  try {
    communicator.Assemble();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), KF_TIMEOUT);
    EXPECT_STREQ(error.what(), "cluster version 3 has not assembled within 0.1 s: rank 1 of 2 has not come");
  }
}

TEST(Assembling, ARankIsTakenOnce) {
  const int fd = shm::Segment::Create(2, 3, 2);
  auto segment = std::make_shared<shm::Segment>(fd);
  close(fd);
  Communicator first(segment, 0, "", false, {});
  EXPECT_THROW(Communicator(segment, 0, "", false, {}), Error);
}

TEST(Segment, RefusesWhatIsNone) {
  const int fd = memfd_create("other", 0);
  EXPECT_THROW(shm::Segment segment(fd), Error);
  ASSERT_EQ(ftruncate(fd, 1 << 20), 0);
  EXPECT_THROW(shm::Segment segment(fd), Error);
  close(fd);
  EXPECT_THROW(shm::Segment::Create(0, 1, 1), Error);
}

// ---- who waits, and how ----

// Rank 1 is one that the scheduler never prefers: yields of rank 0, on the same core, come right back.
TEST(WaitingTime, SleepsAtOnceWhereYieldsDoNotPassTheCoreOn) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers take their own time";
#endif
  constexpr int kOperations = 200;
  Ranks ranks(2, {60s, 60s}, /*cores=*/1);
  cpu_set_t allowed, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  CPU_ZERO(&one);
  for (int core = 0; CPU_COUNT(&one) == 0; core++) {
    if (CPU_ISSET(core, &allowed)) CPU_SET(core, &one);
  }
  double each_us = 0;  // of rank 0's processor time
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    const sched_param none{};
    ASSERT_EQ(sched_setscheduler(0, rank == 1 ? SCHED_IDLE : SCHED_OTHER, &none), 0);
    Sum(communicator, "first", 1, 2);
    timespec begin{}, end{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    for (int i = 0; i < kOperations; i++) Sum(communicator, "x", 1, 2);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    if (rank == 0) each_us = ((end.tv_sec - begin.tv_sec) * 1e6 + (end.tv_nsec - begin.tv_nsec) / 1e3) / kOperations;
  });
  RecordProperty("microseconds", std::to_string(each_us));
  EXPECT_LT(each_us, 25);  // about 9; 35 where it yields in vain to the end
}

// ---- how chunks are staged ----

// What operations of a history are staged like, where plain stores cost `plain` and streaming ones `streamed`.
uint32_t CountStreamed(StagingChoice& choice, uint32_t operations, float plain, float streamed) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < operations; i++) {
    const StagingChoice::Choice next = choice.Next(0);
    choice.Record(0, next, next.streamed ? streamed : plain);
    count += next.streamed ? 1 : 0;
  }
  return count;
}

TEST(Staging, GoesTheQuickerWayAndSeesAtOnceThatTheHostHasMovedACore) {
  StagingChoice choice;
  EXPECT_EQ(CountStreamed(choice, 10, 1.5f, 2.2f), 5u);
  EXPECT_EQ(CountStreamed(choice, 22, 1.5f, 2.2f), 0u);
  EXPECT_EQ(CountStreamed(choice, 8, 1.5f, 2.2f), 2u);    // tries
  EXPECT_EQ(CountStreamed(choice, 20, 5.5f, 2.0f), 18u);  // after two that took too long
  EXPECT_EQ(CountStreamed(choice, 68, 5.5f, 2.0f), 64u);  // tries
  EXPECT_EQ(CountStreamed(choice, 4, 1.5f, 2.2f), 2u);    // tries see that it has moved back
  EXPECT_EQ(CountStreamed(choice, 124, 1.5f, 2.2f), 0u);
}

TEST(Staging, ATryInWhichTheCoreWasLostDecidesNothing) {
  StagingChoice choice;
  CountStreamed(choice, 6, 1.5f, 2.2f);
  CountStreamed(choice, 4, 90.0f, 2.2f);
  EXPECT_EQ(CountStreamed(choice, 118, 1.5f, 2.2f), 6u);  // no more than the three times two that are tries
  CountStreamed(choice, 2, 90.0f, 2.2f);
  CountStreamed(choice, 2, 1.5f, 2.2f);
  EXPECT_EQ(CountStreamed(choice, 60, 1.5f, 2.2f), 0u);
}

TEST(Staging, TriesThatMetFreshPagesAreForgottenSoon) {
  StagingChoice choice;
  CountStreamed(choice, 10, 90.0f, 95.0f);
  CountStreamed(choice, 26, 5.5f, 2.0f);
  EXPECT_EQ(CountStreamed(choice, 28, 5.5f, 2.0f), 28u);
}

TEST(Staging, ALargeOperationTakesManyTurnsAndFollowsWithinItself) {
  StagingChoice choice;
  constexpr uint32_t kChunks = 40 * StagingTurns::kChunks + 5;  // the last turn takes the 5, too
  uint32_t streamed = 0;
  for (int operation = 0; operation < 2; operation++) {
    StagingTurns turns(choice, 0, kChunks, /*chunk_bytes=*/100, /*bytes=*/kChunks * 100 - 1);
    turns.BeginStaging();
    turns.EndStaging();
    turns.BeginReading();
    for (uint32_t chunk = 0; chunk < kChunks; chunk++) {
      const uint32_t ahead = std::min(chunk + 2, kChunks - 1);
      const bool expensive = !turns.Streams(chunk);  // no core shares a cache here
      streamed += expensive ? 0 : 1;
      (void)turns.Streams(ahead);
      const auto end = Clock::now() + std::chrono::microseconds(expensive ? 15 : 5);
      while (Clock::now() < end) {
      }
      turns.HaveRead(chunk + 1);
    }
  }
  // Of 80 turns 18 are tries, half of them of the other way.
  EXPECT_EQ(streamed, 71 * StagingTurns::kChunks + 2 * 5);
  EXPECT_TRUE(choice.Next(0).streamed);
  EXPECT_EQ(choice.Next(1).streamed, false) << "another history";
}

}  // namespace
}  // namespace kungfu::testing
