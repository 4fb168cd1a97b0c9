// Behaviour: forks, mismatches, deadlines, failure, joining and leaving.
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

#include "base/interrupt.h"
#include "base/log.h"
#include "ranks.h"
#include "runtime/peer.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

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
        if (error.status() != KF_INVALID || std::strstr(error.what(), "a forked child is not a member") == nullptr)
          bad++;
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
    refused([&] { mine.RequestSyncPoint(1); });
    refused([&] { ranks.at(0).Assemble(); });
    mine.Beat();
    mine.NoteStep(9, std::chrono::milliseconds(1));
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
  EXPECT_EQ(ranks.segment().status(0).stepped_ns, 0u);
  EXPECT_EQ(ranks.at(0).sync_points(), 0u);
  EXPECT_EQ(ranks.segment().header().gave_up, 0u);
}

TEST(Progress, OfARankIsItsLastReport) {
  Ranks ranks(2);
  shm::SegmentControlBlock& control = ranks.control();
  ranks.at(1).NoteStep(7, std::chrono::milliseconds(20));
  ranks.at(1).NoteStep(8, std::chrono::milliseconds(30));
  EXPECT_FALSE(control.ProgressOf(0).has_value());
  const auto told = control.ProgressOf(1);
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->step, 8u);
  EXPECT_EQ(told->each, std::chrono::milliseconds(30));
  EXPECT_GE(told->ago.count(), 0);
  EXPECT_LE(told->ago, control.ProgressOf(1)->ago) << "a later look, a longer time";
  EXPECT_THROW(control.ProgressOf(2), Error);
}

TEST(Activity, OfARankIsItsLastReportAndWhereItsProcessStandsStill) {
  Ranks ranks(2);
  shm::SegmentControlBlock& control = ranks.control();
  ranks.at(1).NoteActivity(2);
  ranks.at(1).NoteActivity(3);
  EXPECT_EQ(control.ActivityOf(0).activity, 0u);
  EXPECT_EQ(control.ActivityOf(0).ago.count(), 0);
  const auto told = control.ActivityOf(1);
  EXPECT_EQ(told.activity, 3u);
  EXPECT_EQ(told.operations, "");
  EXPECT_GE(told.ago.count(), 0);
  EXPECT_LE(told.ago, control.ActivityOf(1).ago) << "a later look, a longer time";

  shm::WaitReport& report = ranks.segment().status(1).wait_report;
  std::string text = "all-reduce \"loss\"";
  text.resize(sizeof report.text);
  for (size_t i = 0; i < shm::WaitReport::kTextWords; i++) {
    uint64_t word;
    std::memcpy(&word, text.data() + 8 * i, sizeof word);
    report.text[i].store(word);
  }
  report.num_waits.store(1);
  EXPECT_EQ(control.ActivityOf(1).operations, "all-reduce \"loss\"");
  report.version.store(1);  // it is being written
  EXPECT_EQ(control.ActivityOf(1).operations, "");
  EXPECT_THROW(control.ActivityOf(2), Error);
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

TEST(Telling, WaitNamesTheAwaitedRanksAndTheOperation) {
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

TEST(Mismatch, RaisesAtEveryRankWithTheRanksAndTheNextOperationWorks) {
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

// ---- deadlines, abort, failure ----

TEST(Deadline, NamesOperationRankLimitAndVersionAndTheOthersFollow) {
  Ranks ranks(3, {200ms, 10s});
  const auto begin = Clock::now();
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    if (rank == 2) return;  // does not come
    if (rank == 1) std::this_thread::sleep_for(100ms);
    Sum(communicator, "slow", 1, 3);
  });
  EXPECT_LT(Clock::now() - begin, 5s);
  // The rank whose limit is over first says so, and the other one follows it.
  const std::string first =
      "all_reduce \"slow\": no data from rank 2 (127.0.0.1:10002) within 0.2 s, cluster version 7";
  const std::string zero = ErrorOf(errors[0]).what(), one = ErrorOf(errors[1]).what();
  EXPECT_TRUE(zero == first || one == first) << zero << "; " << one;
  EXPECT_TRUE(zero == first || zero == "rank 1 (127.0.0.1:10001) gave up: " + first) << zero;
  EXPECT_EQ(ErrorOf(errors[0]).status(), KF_TIMEOUT);
  EXPECT_EQ(ErrorOf(errors[1]).status(), KF_TIMEOUT);
  // The communicator is finished for every rank, also for a late one.
  const auto late = ranks.Collect([&](uint32_t, Communicator& communicator) { Sum(communicator, "late", 1, 3); });
  for (const auto& error : late) EXPECT_EQ(ErrorOf(error).status(), KF_TIMEOUT) << ErrorOf(error).what();
}

TEST(FailedRank, EndsEveryWaitWithTheLaunchersReason) {
  for (const size_t count : {size_t{1}, size_t{3000000}}) {
    Ranks ranks(3);
    Clock::time_point marked;
    const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
      if (rank == 1) {
        std::this_thread::sleep_for(50ms);
        marked = Clock::now();
        ranks.control().MarkLost(1, "was killed by SIGKILL", /*recover=*/false);
        return;
      }
      Sum(communicator, "doomed", 1, 3, count);
    });
    EXPECT_LT(Clock::now() - marked, 20s);  // and not the deadline
    for (const uint32_t r : {0u, 2u}) {
      EXPECT_EQ(ErrorOf(errors[r]).status(), KF_PEER_LOST);
      EXPECT_STREQ(ErrorOf(errors[r]).what(),
                   "all_reduce \"doomed\": rank 1 (127.0.0.1:10001) was killed by SIGKILL, cluster version 7");
    }
  }
}

TEST(FailedRank, OfAProcessInTheMiddleOfAnyOperationLeavesNoRankHanging) {
  for (unsigned seed = 0; seed < 30; seed++) {
    SCOPED_TRACE(seed);
    const int fd = shm::Segment::Create(3, 1, 2);
    std::vector<pid_t> children;
    for (uint32_t rank = 0; rank < 3; rank++) {
      const pid_t pid = fork();
      if (pid == 0) {
        auto segment = std::make_shared<shm::Segment>(fd);
        HostCommunicator communicator(segment, rank, "", false, {20000ms, 20000ms});
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
    shm::SegmentControlBlock(std::make_shared<shm::Segment>(fd))
        .MarkLost(victim, "was killed by SIGKILL", /*recover=*/false);
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

// Rank 0 looks at rank 1, which has brought its part and left since rank 0 has found it missing.
TEST(Leaving, RightAfterItsPartIsNoLoss) {
  static std::atomic<bool> looks, left;
  looks = left = false;
  Ranks ranks(2);
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    if (rank == 1) {
      while (!looks) std::this_thread::yield();
      Sum(communicator, "last", 1, 2);
      communicator.Leave();
      left = true;
      return;
    }
    const InterruptCheck check([] {
      looks = true;
      while (!left) std::this_thread::yield();
    });
    Sum(communicator, "last", 1, 2);
  });
}

// Rank 1 does something alone for longer than rank 0's limit, which counts from its end.
TEST(Deadline, CountsFromTheEndOfWhatARankDoesAlone) {
  Ranks ranks(2, {1s, 60s});
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    if (rank == 1) {
      communicator.SetBusy(true);
      std::this_thread::sleep_for(1700ms);
      communicator.SetBusy(false);
    }
    Sum(communicator, "late", 1, 2);
  });
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
  // The rank that closes it tells the others what they are to know.
  EXPECT_EQ(ranks.segment().status(0).gave_up.Count(), 0u);
}

TEST(Assembling, NamesTheMissingRanks) {
  const int fd = shm::Segment::Create(2, 3, 2);
  auto segment = std::make_shared<shm::Segment>(fd);
  close(fd);
  HostCommunicator communicator(segment, 0, "", false, {1s, 100ms});
  try {
    communicator.Assemble();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), KF_TIMEOUT);
    EXPECT_STREQ(error.what(), "cluster version 3: rank 1 of 2 has not joined within 0.1 s (KUNGFU_JOIN_TIMEOUT)");
  }
}

TEST(Assembling, ARankIsTakenOnce) {
  const int fd = shm::Segment::Create(2, 3, 2);
  auto segment = std::make_shared<shm::Segment>(fd);
  close(fd);
  HostCommunicator first(segment, 0, "", false, {});
  EXPECT_THROW(HostCommunicator(segment, 0, "", false, {}), Error);
}

TEST(Segment, RefusesWhatIsNone) {
  const int fd = memfd_create("other", 0);
  EXPECT_THROW(shm::Segment segment(fd), Error);
  ASSERT_EQ(ftruncate(fd, 1 << 20), 0);
  EXPECT_THROW(shm::Segment segment(fd), Error);
  close(fd);
  EXPECT_THROW(shm::Segment::Create(0, 1, 1), Error);
}

}  // namespace
}  // namespace kungfu::testing
