// Ranks die at every place in an operation, as processes, and the others end it: with what the dead brought or without,
// all of them alike.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "ranks.h"
#include "runtime/background.h"
#include "runtime/fault_point.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// What the processes of a test tell each other and the test. Inherited over fork.
struct Board {
  struct Rank {
    std::atomic<int> points;    // places that it came to while they were counted
    std::atomic<int> stopped;   // it is at the place where it is to die
    uint32_t took_part[32];     // bit mask of ranks in each operation's result; 0: none
    uint32_t participants[32];  // bit mask of TakeParticipants after each operation
    char failure[256];
  } ranks[8];
};

Board* board = nullptr;
uint32_t my_rank = 0;
int die_at = -1;  // the number of the place, counted from when `armed` was set
bool armed = false;
int passed = 0;

void Hook(const char*) {
  if (!armed) return;
  if (passed++ == die_at) {
    board->ranks[my_rank].stopped = 1;
    raise(SIGKILL);
  }
  board->ranks[my_rank].points = passed;
}

// One rank's contribution: element i of rank r in operation k. Sums of subsets of ranks are all different.
float Value(uint32_t rank, size_t i, int k) { return float(1u << rank) * float(1 + (i + size_t(k)) % 5); }

// The bit mask of the ranks whose values are in `output`, the same for all elements; 0 if it is not such a sum.
uint32_t MaskOf(const std::vector<float>& output, int k, bool mean) {
  uint32_t found = 0;
  for (size_t i = 0; i < output.size(); i++) {
    const float sum = output[i] / float(1 + (i + size_t(k)) % 5);
    uint32_t mask = 0;
    if (mean) {
      for (uint32_t m = 1; m < 256 && mask == 0; m++) {
        if (std::abs(float(m) / float(__builtin_popcount(m)) - sum) < 1e-4f) mask = m;
      }
    } else {
      mask = static_cast<uint32_t>(sum);
    }
    if (i == 0) found = mask;
    if (mask != found) return 0;
  }
  return found;
}

uint32_t MaskOf(const Members& members) {
  uint32_t mask = 0;
  for (const uint32_t r : members) mask |= 1u << r;
  return mask;
}

// A kind of work that is done a number of times by every rank; writes what came of it to the board.
struct Work {
  const char* name;
  std::function<void(Communicator&, Background&, Board::Rank&)> run;
  int results;  // how many of took_part it fills
};

// In place, out of place and in the background, of `count` elements.
void AllReduce(Communicator& communicator, Board::Rank& mine, int slot, size_t count, bool in_place) {
  std::vector<float> x(count), y(count);
  for (size_t i = 0; i < count; i++) x[i] = Value(communicator.rank(), i, slot);
  std::vector<float>& out = in_place ? x : y;
  const kf_tensor tensor{x.data(), out.data(), count};
  communicator.Run({Kind::kAllReduce, "x", &tensor, 1, KF_FLOAT32, KF_SUM, 0, nullptr});
  mine.took_part[slot] = MaskOf(out, slot, false);
  mine.participants[slot] = MaskOf(communicator.TakeParticipants());
}

// A step with groups of several sizes, which have to be of one mind.
void Step(Communicator& communicator, Background* background, Board::Rank& mine, int slot, bool in_place = false) {
  const size_t counts[] = {3, 30000, 150000};
  const char* names[] = {"a", "b", "c"};
  std::vector<std::vector<float>> x, y;
  std::vector<kf_tensor> tensors;
  for (const size_t count : counts) {
    x.emplace_back(count);
    y.emplace_back(count);
    for (size_t i = 0; i < count; i++) x.back()[i] = Value(communicator.rank(), i, slot);
  }
  for (size_t g = 0; g < 3; g++) tensors.push_back({x[g].data(), in_place ? x[g].data() : y[g].data(), counts[g]});
  std::vector<Operation> operations;
  for (size_t g = 0; g < 3; g++) {
    operations.push_back({Kind::kAllReduce, names[g], &tensors[g], 1, KF_FLOAT32, KF_MEAN, 0, nullptr, true, 32});
  }
  if (background == nullptr) {
    communicator.RunAll(operations.data(), operations.size());
  } else {
    const std::shared_ptr<Communicator> shared(&communicator, [](Communicator*) {});
    std::vector<kf_started> started;
    for (size_t g = 0; g < 3; g++) started.push_back({background->Start(shared, operations[g]), &tensors[g], 1});
    background->Wait(started.data(), started.size());
  }
  const auto& out = in_place ? x : y;
  const uint32_t mask = MaskOf(out[0], slot, true);
  const bool alike = mask == MaskOf(out[1], slot, true) && mask == MaskOf(out[2], slot, true);
  mine.took_part[slot] = alike ? mask : 0;
  mine.participants[slot] = MaskOf(communicator.TakeParticipants());
}

std::vector<Work> Works() {
  std::vector<Work> works;
  for (const size_t count : {size_t{2}, size_t{20000}, size_t{160000}, size_t{700000}}) {
    for (const bool in_place : {false, true}) {
      works.push_back({in_place ? "all_reduce in place" : "all_reduce",
                       [=](Communicator& communicator, Background&, Board::Rank& mine) {
                         for (int slot = 0; slot < 3; slot++) AllReduce(communicator, mine, slot, count, in_place);
                       },
                       3});
    }
  }
  for (const bool in_place : {false, true}) {
    works.push_back({in_place ? "step in place" : "step",
                     [=](Communicator& communicator, Background&, Board::Rank& mine) {
                       for (int slot = 0; slot < 2; slot++) Step(communicator, nullptr, mine, slot, in_place);
                     },
                     2});
  }
  works.push_back({"step in the background",
                   [](Communicator& communicator, Background& background, Board::Rank& mine) {
                     for (int slot = 0; slot < 2; slot++) Step(communicator, &background, mine, slot);
                   },
                   2});
  return works;
}

// A cluster of processes, of which some are to die at given places, and the launcher that sees them die.
class Cluster {
 public:
  Cluster(uint32_t size, const Work& work, const std::vector<std::pair<uint32_t, int>>& victims, uint32_t cores = 2)
      : size_(size), work_(work), victims_(victims) {
    fd_ = shm::Segment::Create(size, 1, cores, /*recovers=*/true);
    std::memset(static_cast<void*>(board), 0, sizeof *board);
    for (uint32_t rank = 0; rank < size; rank++) {
      const pid_t pid = fork();
      if (pid == 0) Child(rank);
      pids_.push_back(pid);
    }
  }
  ~Cluster() { close(fd_); }

  // Returns a complaint, or nothing if all is as it should be.
  std::string Supervise() {
    shm::Segment segment(fd_);
    uint32_t alive = (1u << size_) - 1, left = size_;
    const auto deadline = Clock::now() + 20s;
    std::string complaint;
    while (left > 0) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, WNOHANG);
      if (pid == 0) {
        if (Clock::now() > deadline) {
          for (const pid_t each : pids_) kill(each, SIGKILL);
          complaint = "they hang";
        }
        std::this_thread::sleep_for(100us);
        continue;
      }
      const auto rank = uint32_t(std::find(pids_.begin(), pids_.end(), pid) - pids_.begin());
      if (rank == size_) continue;
      left--;
      if (WIFSIGNALED(status)) {
        alive &= ~(1u << rank);
        segment.MarkLost(rank, "was killed by SIGKILL", /*recover=*/true);
      } else if (WEXITSTATUS(status) != 0) {
        complaint += Text("rank ", rank, " failed: ", board->ranks[rank].failure, "; ");
      }
    }
    uint32_t dying = 0;
    for (const auto& [rank, place] : victims_) dying |= 1u << rank;
    for (int slot = 0; slot < work_.results; slot++) {
      std::set<uint32_t> outcomes;
      for (uint32_t r = 0; r < size_; r++) {
        if ((alive >> r & 1) == 0) continue;
        outcomes.insert(board->ranks[r].took_part[slot]);
        if (board->ranks[r].participants[slot] != board->ranks[r].took_part[slot]) {
          complaint += Text("operation ", slot, ": rank ", r, " has the parts of ", board->ranks[r].took_part[slot],
                            " but takes ", board->ranks[r].participants[slot], " for those who took part; ");
        }
      }
      if (outcomes.size() != 1) complaint += Text("operation ", slot, ": ", outcomes.size(), " different outcomes; ");
      for (const uint32_t mask : outcomes) {
        if ((mask & alive) != alive || (mask & ~((1u << size_) - 1)) != 0) {
          complaint += Text("operation ", slot, " has the parts of ", mask, ", alive are ", alive, "; ");
        }
      }
    }
    return complaint;
  }

 private:
  [[noreturn]] void Child(uint32_t rank) {
    my_rank = rank;
    for (const auto& [victim, place] : victims_) {
      if (victim == rank) die_at = place;
    }
    fault_hook = Hook;
    Board::Rank& mine = board->ranks[rank];
    try {
      Communicator communicator(std::make_shared<shm::Segment>(fd_), rank, "", false, {10000ms, 10000ms});
      communicator.Assemble();
      Background background;
      armed = true;
      work_.run(communicator, background, mine);
      background.Stop();
      communicator.Leave();
    } catch (const std::exception& error) {
      CopyText(mine.failure, error.what());
      _exit(1);
    }
    _exit(0);
  }

  const uint32_t size_;
  const Work& work_;
  const std::vector<std::pair<uint32_t, int>> victims_;
  int fd_;
  std::vector<pid_t> pids_;
};

class Recovery : public ::testing::Test {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "it sees nothing of what passes between processes; threads run the same code in other tests";
#endif
    board =
        static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  }
  void TearDown() override {
    if (board != nullptr) munmap(board, sizeof(Board));
    board = nullptr;
  }
};

// All places, which takes minutes, with KUNGFU_KILL_EVERYWHERE in the environment; else as many as there is time for,
// in an order of their own in each run.
TEST_F(Recovery, SurvivorsEndEveryOperationAlikeWhereverOneDies) {
  struct Case {
    uint32_t size;
    const Work* work;
    uint32_t victim;
    int place;
  };
  const std::vector<Work> works = Works();
  std::vector<Case> cases;
  for (const uint32_t size : {2u, 3u, 4u}) {
    for (const Work& work : works) {
      Cluster undisturbed(size, work, {});
      ASSERT_EQ(undisturbed.Supervise(), "") << work.name;
      for (uint32_t r = 0; r < size; r++) {
        ASSERT_GT(board->ranks[r].points, 0);
        for (int place = 0; place < board->ranks[r].points; place++) cases.push_back({size, &work, r, place});
      }
    }
  }
  const unsigned seed = std::random_device()();
  std::shuffle(cases.begin(), cases.end(), std::mt19937(seed));
  const auto deadline = Clock::now() + (std::getenv("KUNGFU_KILL_EVERYWHERE") != nullptr ? 3600s : 20s);
  int kills = 0;
  for (const Case& each : cases) {
    if (Clock::now() > deadline) break;
    Cluster cluster(each.size, *each.work, {{each.victim, each.place}});
    ASSERT_EQ(cluster.Supervise(), "") << each.work->name << ", " << each.size << " ranks, rank " << each.victim
                                       << " at place " << each.place;
    kills += board->ranks[each.victim].stopped;
  }
  std::printf("killed at %d of %zu places\n", kills, cases.size());
  EXPECT_GT(kills, 10);
}

TEST_F(Recovery, SurvivorsEndEveryOperationAlikeWhereverTwoDie) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  const std::vector<Work> works = Works();
  const auto deadline = Clock::now() + 10s;
  for (int round = 0; round < 150 && Clock::now() < deadline; round++) {
    const uint32_t size = 3 + random() % 3;
    const Work& work = works[random() % works.size()];
    const uint32_t first = random() % size, second = (first + 1 + random() % (size - 1)) % size;
    const int place = int(random() % 30), other = int(random() % 30);
    Cluster cluster(size, work, {{first, place}, {second, other}}, 1 + random() % 4);
    ASSERT_EQ(cluster.Supervise(), "") << "seed " << seed << ", round " << round << ": " << work.name << ", " << size
                                       << " ranks, " << first << " at " << place << ", " << second << " at " << other;
  }
}

// ---- what single operations give, with the dead marked by hand ----

std::vector<std::exception_ptr> RunWithout(Ranks& ranks, uint32_t dead,
                                           const std::function<void(uint32_t, Communicator&)>& body) {
  return ranks.Collect([&](uint32_t rank, Communicator& communicator) {
    if (rank == dead) {
      std::this_thread::sleep_for(5ms);
      ranks.segment().MarkLost(dead, "was killed by SIGKILL", /*recover=*/true);
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
  ranks.segment().MarkLost(1, "hung for 30 s", /*recover=*/true);
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

TEST(WithoutOne, AMismatchIsStillAMismatch) {
  Ranks ranks(4, {10s, 10s}, 2, /*recovers=*/true);
  const auto errors = RunWithout(ranks, 2, [&](uint32_t rank, Communicator& communicator) {
    std::vector<float> x(100001), y(100001);
    communicator.Run(Op(Kind::kAllReduce, "m", {{x.data(), y.data(), rank == 3 ? 100001u : 100000u}}, KF_FLOAT32));
  });
  for (const uint32_t r : {0u, 1u, 3u})
    EXPECT_EQ(ErrorOf(errors[r]).status(), KF_MISMATCH) << ErrorOf(errors[r]).what();
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
        // Who counts for nothing may bring anything.
        for (size_t i = 0; i < count; i++) x[i] = rank == 1 ? T(NAN) : ToStored<T>(float(rank + 1) * float(i % 13));
        const kf_tensor tensor{x.data(), y.data(), count};
        const Operation operation{Kind::kAllReduce, "w", &tensor, 1, dtype, KF_MEAN, 0, nullptr, true, weights[rank]};
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
    const Operation operation{Kind::kAllReduce, "w", &tensor, 1, KF_FLOAT32, KF_MEAN, 0, nullptr, true, 7};
    communicator.RunAll(&operation, 1);
    communicator.Run(Op(Kind::kAllReduce, "p", {{x.data(), plain.data(), x.size()}}, KF_FLOAT32, KF_MEAN));
    ASSERT_EQ(weighted, plain);
  });
}

TEST(Weights, OfTheDeadAreGone) {
  Ranks ranks(3, {10s, 10s}, 2, /*recovers=*/true);
  ExpectNoErrors(RunWithout(ranks, 2, [&](uint32_t rank, Communicator& communicator) {
    float x = rank == 0 ? 1 : 5, y = 0;
    const kf_tensor tensor{&x, &y, 1};
    const Operation operation{Kind::kAllReduce, "w", &tensor, 1,    KF_FLOAT32,
                              KF_MEAN,          0,   nullptr, true, rank == 0 ? 3u : 1u};
    communicator.RunAll(&operation, 1);
    EXPECT_EQ(y, 2);
    EXPECT_EQ(communicator.TakeParticipants(), (Members{0, 1}));
    EXPECT_EQ(communicator.TakeParticipants(), (Members{0, 1, 2}));  // nothing since then
  }));
}

}  // namespace
}  // namespace kungfu::testing
