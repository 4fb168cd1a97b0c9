// What is left to do where a rank has died: single operations, with the failed ranks marked by hand.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "base/fault_point.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "ranks.h"
#include "runtime/peer.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::vector<std::exception_ptr> RunWithout(Ranks& ranks, uint32_t failed,
                                           const std::function<void(uint32_t, Communicator&)>& body) {
  return ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    if (rank == failed) {
      std::this_thread::sleep_for(5ms);
      ranks.control().MarkLost(failed, "was killed by SIGKILL", /*recover=*/true);
    } else {
      body(rank, communicator);
    }
  });
}

void ExpectNoErrors(const std::vector<std::exception_ptr>& errors) {
  for (const auto& error : errors) EXPECT_FALSE(error) << ErrorOf(error).what();
}

TEST(WithoutOne, AGatherHasZerosAndAScatterDropsItsPart) {
  for (const size_t count : {size_t{4}, size_t{90000}}) {
    Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
    ExpectNoErrors(RunWithout(ranks, 1, [&](uint32_t rank, Communicator& communicator) {
      std::vector<float> x(count, float(rank + 1)), all(3 * count, -1);
      communicator.Run(Op(Kind::kAllGather, "g", {{x.data(), all.data(), count}}, KF_FLOAT32));
      for (size_t i = 0; i < count; i++) {
        ASSERT_EQ(all[i], 1);
        ASSERT_EQ(all[count + i], 0);
        ASSERT_EQ(all[2 * count + i], 3);
      }
      std::vector<float> brought(3 * count), part(count, -1);
      for (size_t i = 0; i < brought.size(); i++) brought[i] = float(rank + 1) * float(i % 11);
      communicator.Run(Op(Kind::kReduceScatter, "s", {{brought.data(), part.data(), 3 * count}}, KF_FLOAT32));
      for (size_t i = 0; i < count; i++) ASSERT_EQ(part[i], 4 * float((rank * count + i) % 11));
    }));
  }
}

TEST(WithoutOne, ABroadcastFromItFailsEverywhereAndAnotherRootServes) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  ExpectNoErrors(RunWithout(ranks, 0, [&](uint32_t rank, Communicator& communicator) {
    float x = float(rank);
    try {
      communicator.Run(Op(Kind::kBroadcast, "b", {{&x, &x, 1}}, KF_FLOAT32, KF_SUM, 0));
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), KF_PEER_LOST);
      EXPECT_STREQ(error.what(),
                   "broadcast \"b\": its root, rank 0 (127.0.0.1:10000), was killed by SIGKILL, cluster version 7");
    }
    communicator.Run(Op(Kind::kBroadcast, "b", {{&x, &x, 1}}, KF_FLOAT32, KF_SUM, 2));
    EXPECT_EQ(x, 2);
    EXPECT_EQ(communicator.Living(), (Members{1, 2}));
  }));
}

TEST(WithoutOne, AnExpelledProcessLearnsItAndPublishesNothing) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  ranks.control().MarkLost(1, "hung for 30 s", /*recover=*/true);
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    float x = float(rank + 1), y = 0;
    communicator.Run(Op(Kind::kAllReduce, "x", {{&x, &y, 1}}, KF_FLOAT32));
    EXPECT_EQ(y, 4);
  });
  EXPECT_FALSE(errors[0]);
  EXPECT_FALSE(errors[2]);
  EXPECT_EQ(ErrorOf(errors[1]).status(), KF_PEER_LOST);
  EXPECT_STREQ(ErrorOf(errors[1]).what(),
               "this process, rank 1 (127.0.0.1:10001), has been expelled from cluster version 7: it hung for 30 s");
}

// Not even that the communicator is finished for all.
TEST(WithoutOne, GiveUpOfALostRankIsIgnored) {
  Ranks ranks(2, {10s, 10s}, 2, /*recovers=*/true);
  ranks.control().GiveUp(1, GaveUp::kForAll, KF_TIMEOUT, "too late");
  EXPECT_TRUE(ranks.control().GaveUpForAll());
  ranks.control().MarkLost(1, "was killed by SIGKILL", /*recover=*/true);
  EXPECT_FALSE(ranks.control().GaveUpForAll());
}

// Also ranks that wait for a survivor, which may do the operation again meanwhile.
TEST(WithoutOne, SleepingRanksAreWoken) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  ranks.Run([](uint32_t, Communicator& communicator) { Sum(communicator, "x", 1, 3); });
  const auto begin = Clock::now();
  std::thread waiter([&] {
    shm::Counter& word = ranks.segment().mailbox(0, 1, 0).sequence;
    for (;;) {
      const uint32_t armed = word.Arm();
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (ranks.control().HasFailed(2)) return;
      word.Sleep(armed, 30s);
    }
  });
  std::this_thread::sleep_for(20ms);
  ranks.control().MarkLost(2, "was killed by SIGKILL", /*recover=*/true);
  waiter.join();
  EXPECT_LT(Clock::now() - begin, 25s);
}

#ifdef KUNGFU_FAULT_POINTS
// Stories in which the ranks are threads: what happens where a rank comes to a place.
thread_local uint32_t rank_of_thread = 0;
std::function<void(uint32_t rank, const std::string& place)> story;

struct Story {
  explicit Story(std::function<void(uint32_t rank, const std::string& place)> told) {
    story = std::move(told);
    fault_hook = [](const char* place) { story(rank_of_thread, place); };
  }
  ~Story() { fault_hook = nullptr; }
};
struct Killed {};  // no exception of any library

// The failed rank has posted. Rank 0, whose operation goes in chunks, finds it unfinished and goes on without it, with
// no complaint; rank 1, which comes then with an operation that is complete with its post, sees three that differ.
TEST(WithoutOne, AMismatchIsStillAMismatchIfAFailedRankHadPosted) {
  Ranks ranks(3, {5s, 5s}, /*cores=*/8, /*recovers=*/true);
  std::atomic<bool> posted{false}, gone_on{false};
  Story told([&](uint32_t rank, const std::string& place) {
    if (rank == 2 && place == "after the post") {
      ranks.control().MarkLost(2, "was killed by SIGKILL", /*recover=*/true);  // and its post stays where it is
      posted = true;
      throw Killed{};
    }
    if (rank == 0 && place == "before the next generation") gone_on = true;
  });
  const auto begin = Clock::now();
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    rank_of_thread = rank;
    const size_t count = rank == 1 ? 2 : 200000;
    std::vector<float> x(count), y(3 * count);
    while (rank != 2 && !posted) std::this_thread::yield();
    while (rank == 1 && !gone_on) std::this_thread::yield();
    communicator.Run(Op(Kind::kAllGather, "m", {{x.data(), y.data(), count}}, KF_FLOAT32));
  });
  EXPECT_LT(Clock::now() - begin, 4s);
  for (const uint32_t r : {0u, 1u}) EXPECT_EQ(ErrorOf(errors[r]).status(), KF_MISMATCH) << ErrorOf(errors[r]).what();
}

// Between the first fence and the entry in the list of failures, and everywhere else: what the expelled one throws, it
// throws alone.
TEST(WithoutOne, ExpelledProcessMakesNoOtherGiveUp) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  shm::RankStatus& status = ranks.segment().status(1);
  status.gave_up.Fence();
  std::atomic<bool> thrown{false};
  for (const uint32_t c : {0u, 1u}) ranks.segment().mailbox(0, 1, c).sequence.Fence();
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    float x = float(rank + 1), y = 0;
    if (rank == 1) {
      try {
        communicator.Run(Op(Kind::kAllReduce, "x", {{&x, &y, 1}}, KF_FLOAT32));
      } catch (const Error&) {
        ranks.control().MarkLost(1, "can't be killed", /*recover=*/true);
        throw;
      }
    }
    communicator.Run(Op(Kind::kAllReduce, "x", {{&x, &y, 1}}, KF_FLOAT32));
    EXPECT_EQ(y, 4);
  });
  EXPECT_FALSE(errors[0]) << ErrorOf(errors[0]).what();
  EXPECT_FALSE(errors[2]) << ErrorOf(errors[2]).what();
  EXPECT_EQ(ErrorOf(errors[1]).status(), KF_PEER_LOST);
}

// Rank 0 has found the lock of the table free, and stands still until rank 1 has it.
TEST(WithoutOne, TwoNeverHaveTheTable) {
  Ranks ranks(2);
  std::atomic<bool> free{false}, first{false}, over{false}, both{false};
  Story told([&](uint32_t rank, const std::string& place) {
    if (rank == 0 && place == "before it takes the lock of the table") {
      free = true;
      while (!first) std::this_thread::yield();
    }
    if (place != "with the lock of the table") return;
    if (rank == 0 && !over) both = true;
    if (rank == 1 && !first) {
      first = true;
      std::this_thread::sleep_for(50ms);
      over = true;
    }
  });
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    rank_of_thread = rank;
    while (rank == 1 && !free) std::this_thread::yield();
    Sum(communicator, "x", 1, 2);
  });
  EXPECT_FALSE(both);
}

// It stands still with the lock of the table, for ever as far as the others know, and goes on when they are through.
TEST(WithoutOne, RankFrozenWithTheTableDelaysAndDisturbsNoOther) {
  for (const char* const where :
       {"with the lock of the table", "before a channel is declared", "after a channel is declared",
        "before a channel has its key", "before the lock of the table is given back"}) {
    SCOPED_TRACE(where);
    Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
    std::atomic<bool> frozen{false}, go_on{false};
    std::atomic<int> through{0};
    Story told([&](uint32_t rank, const std::string& place) {
      if (rank != 1 || place != where || frozen) return;
      ranks.control().MarkLost(1, "can't be killed", /*recover=*/true);
      frozen = true;
      while (!go_on) std::this_thread::yield();
    });
    const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
      rank_of_thread = rank;
      while (rank != 1 && !frozen) std::this_thread::yield();
      for (int i = 0; i < 200; i++) {
        std::vector<float> x(i % 3 == 0 ? 30000 : 1, float(rank + 1)), y(x.size());
        communicator.Run(
            Op(Kind::kAllReduce, ("n" + std::to_string(i)).c_str(), {{x.data(), y.data(), x.size()}}, KF_FLOAT32));
        ASSERT_EQ(y.back(), 4);
        if (i == 100 && ++through == 2) go_on = true;  // in the midst of the others' second hundred
      }
    });
    EXPECT_FALSE(errors[0]) << ErrorOf(errors[0]).what();
    EXPECT_FALSE(errors[2]) << ErrorOf(errors[2]).what();
    EXPECT_EQ(ErrorOf(errors[1]).status(), KF_PEER_LOST) << ErrorOf(errors[1]).what();
  }
}

// Two failures in a row at the lock. The first one, which is only frozen, had declared a channel; the second one dies
// when it has taken the lock over and not retired that channel yet. The first one goes on when the others have used the
// table for a while.
TEST(WithoutOne, ChannelsOfTheFailedAreRetiredIfTheNextFailsWithTheTable) {
  Ranks ranks(4, {10s, 10s}, 2, /*recovers=*/true);
  std::atomic<bool> frozen{false}, taken_over{false}, go_on{false};
  std::atomic<int> through{0};
  Story told([&](uint32_t rank, const std::string& place) {
    std::atomic<bool>* there = nullptr;
    if (rank == 1 && place == "after a channel is declared" && !frozen) there = &frozen;
    if (rank == 2 && place == "with the lock of the table" && !taken_over) there = &taken_over;
    if (there == nullptr) return;
    ranks.control().MarkLost(rank, "can't be killed", /*recover=*/true);
    *there = true;
    while (!go_on) std::this_thread::yield();
  });
  const auto retired = [&] {
    int count = 0;
    for (const auto& word : ranks.segment().header().retired) count += __builtin_popcountll(word.load());
    return count;
  };
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    rank_of_thread = rank;
    while (rank == 2 && !frozen) std::this_thread::yield();
    while (rank % 3 == 0 && !taken_over) std::this_thread::yield();
    try {
      for (int i = 0; i < 200; i++) {
        float x = float(rank + 1), y = 0;
        communicator.Run(Op(Kind::kAllReduce, ("n" + std::to_string(i)).c_str(), {{&x, &y, 1}}, KF_FLOAT32));
        EXPECT_EQ(y, 5);
        EXPECT_EQ(retired(), 1);
        if (i == 100 && ++through == 2) go_on = true;
      }
    } catch (...) {
      go_on = true;
      throw;
    }
  });
  for (const uint32_t r : {0u, 3u}) EXPECT_FALSE(errors[r]) << ErrorOf(errors[r]).what();
  for (const uint32_t r : {1u, 2u}) EXPECT_EQ(ErrorOf(errors[r]).status(), KF_PEER_LOST) << ErrorOf(errors[r]).what();
}

// Its other thread finds the communicator closed, and that is no failure which the others have to follow.
TEST(WithoutOne, AnInterruptedOneIsOutAloneWhateverItsOtherThreadIsAt) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  constexpr uint32_t kOther = 11;  // the second thread of rank 1
  static std::atomic<bool> interrupted;
  interrupted = false;
  std::atomic<bool> other_gives_up{false};
  Story told([&](uint32_t rank, const std::string& place) {
    if (rank == kOther && place == "after the post") interrupted = true;
    if (rank == kOther && place == "before it gives up") other_gives_up = true;
    if (rank != 1 || place != "when it has closed its communicator") return;
    // The other one looks around every 20 ms. Where it can come between, it does.
    for (const auto end = Clock::now() + 500ms; !other_gives_up && Clock::now() < end;) std::this_thread::yield();
  });
  const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    rank_of_thread = rank;
    float x = float(rank + 1), y = 0;
    if (rank != 1) {
      communicator.Run(Op(Kind::kAllReduce, "x", {{&x, &y, 1}}, KF_FLOAT32));
      EXPECT_EQ(y, 4);
      return;
    }
    std::thread other([&] {
      rank_of_thread = kOther;
      float in = 1, out = 0;
      try {
        communicator.Run(Op(Kind::kAllReduce, "of the other thread", {{&in, &out, 1}}, KF_FLOAT32));
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), KF_ABORTED);
        EXPECT_STREQ(error.what(), "the wait was interrupted by KeyboardInterrupt");
      }
    });
    const InterruptCheck check([] {
      if (interrupted) throw Interrupted("KeyboardInterrupt");
    });
    EXPECT_THROW(communicator.Run(Op(Kind::kAllReduce, "of the first", {{&x, &y, 1}}, KF_FLOAT32)), Interrupted);
    other.join();
    EXPECT_EQ(ranks.segment().status(1).gave_up.Count(), uint32_t(GaveUp::kAlone));
    ranks.control().MarkLost(1, "has ended with 130", /*recover=*/true);
  });
  ExpectNoErrors(errors);
}

#endif

// As a process that is to become a member, which its peer is.
TEST(WithoutOne, OneThatIsInterruptedWhileItJoinsIsOutAloneAndHasNotLeft) {
  const int before = shm::Segment::Create(1, 7, 2, /*recovers=*/true);
  const int fd = shm::Segment::Create(3, 8, 2, /*recovers=*/true);
  Peer::Get().Join(before, 0, "", true, {10s, 10s});
  const auto segment = std::make_shared<shm::Segment>(fd);
  const CommunicatorOptions options{10s, 10s, /*tell_after=*/20ms};
  HostCommunicator zero(segment, 0, "", true, options);
  {
    const InterruptCheck check([] { throw Interrupted("KeyboardInterrupt"); });
    EXPECT_THROW(Peer::Get().Join(fd, 1, "", true, options), Interrupted);
  }
  shm::SegmentControlBlock launchers(segment);
  EXPECT_EQ(launchers.GaveUpAlone(1), "CollectiveAbortedError: the wait was interrupted by KeyboardInterrupt");
  HostCommunicator two(segment, 2, "", true, options);

  SetLog([&](const std::string& line) {  // one of the two waits, and knows for what
    if (line.find("rank 1 (which gave up and will be killed: ") != std::string::npos) {
      launchers.MarkLost(1, "has ended with 130", /*recover=*/true);
    }
  });
  std::vector<std::exception_ptr> errors(2);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 2; i++) {
    threads.emplace_back([&, i] {
      try {
        HostCommunicator& communicator = i == 0 ? zero : two;
        communicator.Assemble();
        float x = float(i + 1), y = 0;
        communicator.Run(Op(Kind::kAllReduce, "x", {{&x, &y, 1}}, KF_FLOAT32));
        EXPECT_EQ(y, 3);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  SetLog(nullptr);
  ExpectNoErrors(errors);

  // Nor does its heart beat in the version that it comes from: the launcher can see that it hangs.
  const shm::Segment old(before);
  const uint32_t beats = old.status(0).heartbeat;
  std::this_thread::sleep_for(350ms);  // three beats
  EXPECT_EQ(old.status(0).heartbeat, beats);
  Peer::Get().Reset();
  close(before);
  close(fd);
}

// If no rank recovers it has failed for good, and a rank that meets it in an operation gets the reason.
TEST(Joining, InterruptedRankEndsTheOthersWithoutRecovery) {
  const int fd = shm::Segment::Create(2, 8, 2);
  const auto segment = std::make_shared<shm::Segment>(fd);
  {
    const InterruptCheck check([] { throw Interrupted("KeyboardInterrupt"); });
    EXPECT_THROW(Peer::Get().Join(fd, 1, "", true, {10s, 10s}), Interrupted);
  }
  close(fd);
  EXPECT_EQ(segment->status(1).state.Count(), uint32_t(RankState::kLeft));
  HostCommunicator zero(segment, 0, "", true, {10s, 10s});
  zero.Assemble();
  float x = 1, y = 0;
  try {
    zero.Run(Op(Kind::kAllReduce, "x", {{&x, &y, 1}}, KF_FLOAT32));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), KF_ABORTED);
    EXPECT_STREQ(error.what(), "rank 1 gave up: the wait was interrupted by KeyboardInterrupt");
  }
}

TEST(WithoutOne, AMismatchIsStillAMismatch) {
  Ranks ranks(4, {10s, 10s}, 2, /*recovers=*/true);
  const auto errors = RunWithout(ranks, 2, [&](uint32_t rank, Communicator& communicator) {
    std::vector<float> x(100001), y(100001);
    communicator.Run(Op(Kind::kAllReduce, "m", {{x.data(), y.data(), rank == 3 ? 100001u : 100000u}}, KF_FLOAT32));
  });
  for (const uint32_t r : {0u, 1u, 3u})
    EXPECT_EQ(ErrorOf(errors[r]).status(), KF_MISMATCH) << ErrorOf(errors[r]).what();
}

// It can't go on, for lack of memory say. The others neither fail nor go on by themselves: it is the launcher that sees
// its heart stand still and ends it.
TEST(WithoutOne, OneThatFailsByItselfIsOutAndTheOthersGoOnOnceItIsEnded) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  ranks.at(1).Beat();
  ranks.at(1).GiveUp(Error(KF_INTERNAL, "no memory for 12 bytes"));
  ranks.at(1).Beat();
  EXPECT_EQ(ranks.segment().status(1).heartbeat, 1u);
  EXPECT_EQ(ranks.control().GaveUpAlone(1), "InternalError: no memory for 12 bytes");
  EXPECT_EQ(ranks.control().GaveUpAlone(0), "");
  const auto errors = RunWithout(ranks, 1, [&](uint32_t rank, Communicator& communicator) {
    float x = float(rank + 1), y = 0;
    communicator.Run(Op(Kind::kAllReduce, "x", {{&x, &y, 1}}, KF_FLOAT32));
    EXPECT_EQ(y, 4);
  });
  ExpectNoErrors(errors);
  float x = 0, y = 0;
  EXPECT_THROW(ranks.at(1).Run(Op(Kind::kAllReduce, "x", {{&x, &y, 1}}, KF_FLOAT32)), Error);
}

TEST(WithoutOne, ChannelsOfARemovedRankAreFreeOnceItIsReaped) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  const auto bound = [&] {
    uint32_t count = 0;
    for (uint32_t c = 0; c < shm::kChannels; c++) count += ranks.segment().channel(c).IsBound() ? 1 : 0;
    return count;
  };
  ranks.Run([&](uint32_t, Communicator& communicator) {
    for (int i = 0; i < 400; i++) communicator.Run(Op(Kind::kBarrier, ("n" + std::to_string(i)).c_str(), {}, KF_UINT8));
  });
  EXPECT_EQ(bound(), 400u);
  ranks.control().MarkLost(1, "was killed by SIGKILL", /*recover=*/true);
  ExpectNoErrors(ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    for (int i = 0; i < 400 && rank != 1; i++) {
      communicator.Run(Op(Kind::kBarrier, ("n" + std::to_string(i)).c_str(), {}, KF_UINT8));
    }
  }));
  EXPECT_EQ(bound(), 800u) << "it may still write there";
  ranks.control().MarkLost(1, "is gone at last", /*recover=*/true, /*reaped=*/true);
  EXPECT_EQ(bound(), 400u);
  EXPECT_EQ(ranks.segment().header().num_failed, 1u) << "it has died once";
  EXPECT_STREQ(ranks.segment().status(1).lost_reason, "was killed by SIGKILL") << "the first word counts";
}

TEST(WithoutOne, ManyNamesGoOnForMoreStepsThanTheTableHolds) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  ExpectNoErrors(RunWithout(ranks, 1, [&](uint32_t, Communicator& communicator) {
    for (int i = 0; i < 3000; i++) {
      float x = float(i), y = 0;
      communicator.Run(Op(Kind::kAllReduce, ("n" + std::to_string(i % 700)).c_str(), {{&x, &y, 1}}, KF_FLOAT32));
      ASSERT_EQ(y, 2 * float(i));
    }
    std::vector<float> x(100000, 1), y(100000);
    for (int i = 0; i < 500; i++) {
      communicator.Run(Op(Kind::kAllReduce, "large", {{x.data(), y.data(), x.size()}}, KF_FLOAT32));
      ASSERT_EQ(y[99999], 2);
    }
  }));
}

// ---- weights ----

template <typename T>
T ToStored(float x);
template <>
float ToStored(float x) {
  return x;
}
template <>
double ToStored(float x) {
  return x;
}

template <typename T>
void ExpectWeightedMeans(kf_dtype dtype, double tolerance) {
  const uint32_t weights[] = {3, 0, 9, 4};
  for (const uint32_t size : {2u, 3u, 4u}) {
    for (const size_t count : {size_t{1}, size_t{5000}, size_t{200000}}) {
      Ranks ranks(size);
      ranks.Run([&](uint32_t rank, Communicator& communicator) {
        std::vector<T> x(count), y(count);
        // A rank without weight may bring anything.
        for (size_t i = 0; i < count; i++) x[i] = rank == 1 ? T(NAN) : ToStored<T>(float(rank + 1) * float(i % 13));
        const kf_tensor tensor{x.data(), y.data(), count};
        const Operation operation{Kind::kAllReduce, "w", &tensor, 1, dtype, KF_MEAN, 0, nullptr, {true, weights[rank]}};
        communicator.RunAll(&operation, 1);
        double scale = 0, total = 0;
        for (uint32_t r = 0; r < size; r++) {
          scale += double(weights[r]) * (r + 1);
          total += weights[r];
        }
        for (size_t i = 0; i < count; i++) ASSERT_NEAR(y[i], scale / total * double(i % 13), tolerance) << i;
      });
    }
  }
}

TEST(Weights, AMeanCountsEachRankByItsWeight) {
  ExpectWeightedMeans<float>(KF_FLOAT32, 1e-4);
  ExpectWeightedMeans<double>(KF_FLOAT64, 1e-12);
}

TEST(Weights, EqualOnesGiveTheBitsOfTheMean) {
  Ranks ranks(3);
  ranks.Run([&](uint32_t rank, Communicator& communicator) {
    std::vector<float> x(1000), weighted(1000), plain(1000);
    for (size_t i = 0; i < x.size(); i++) x[i] = 1.0f / float(rank + i + 1);
    const kf_tensor tensor{x.data(), weighted.data(), x.size()};
    const Operation operation{Kind::kAllReduce, "w", &tensor, 1, KF_FLOAT32, KF_MEAN, 0, nullptr, {true, 7}};
    communicator.RunAll(&operation, 1);
    communicator.Run(Op(Kind::kAllReduce, "p", {{x.data(), plain.data(), x.size()}}, KF_FLOAT32, KF_MEAN));
    ASSERT_EQ(weighted, plain);
  });
}

TEST(Weights, OfFailedRanksAreDropped) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  ExpectNoErrors(RunWithout(ranks, 2, [&](uint32_t rank, Communicator& communicator) {
    float x = rank == 0 ? 1 : 5, y = 0;
    const kf_tensor tensor{&x, &y, 1};
    const Operation operation{Kind::kAllReduce,           "w", &tensor, 1, KF_FLOAT32, KF_MEAN, 0, nullptr,
                              {true, rank == 0 ? 3u : 1u}};
    communicator.RunAll(&operation, 1);
    EXPECT_EQ(y, 2);
    EXPECT_EQ(TakeParticipants(communicator), (Members{0, 1}));
    EXPECT_EQ(TakeParticipants(communicator), (Members{0, 1, 2}));  // nothing since then
  }));
}

}  // namespace
}  // namespace kungfu::testing
