// Ranks die at every place in an operation, as processes, and the others end it: with what the failed ranks brought or
// without, all of them alike.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "base/fault_point.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "killed_ranks.h"
#include "ranks.h"
#include "runtime/background.h"
#include "runtime/peer.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// What the processes of a test tell each other and the test. Inherited over fork.
struct Results {
  struct Rank {
    std::atomic<int> points;    // places that it came to while they were counted
    std::atomic<int> stopped;   // it is at the place where it is to die
    std::atomic<int> go_on;     // it was only frozen, and the launcher has given it up
    uint32_t took_part[32];     // outcome of each operation: a bit mask of ranks, or one of the following; 0: none
    uint32_t participants[32];  // bit mask of TakeParticipants after each operation
    char failure[256];
  } ranks[8];
  std::atomic<uint32_t> arrived[32];  // bit mask of the ranks that have come to each barrier
};
constexpr uint32_t kRootLost = 1u << 16;
constexpr uint32_t kMismatch = 1u << 17;

Results* results = nullptr;
uint32_t my_rank = 0;
int fail_at = -1;  // the number of the place, counted from when `armed` was set
bool freezes = false;
bool armed = false;
int passed = 0;

// Dies, or stands still until the launcher has taken it for dead and goes on then, as one that can't be killed does.
void Hook(const char*) {
  if (!armed) return;
  Results::Rank& mine = results->ranks[my_rank];
  if (passed++ == fail_at) {
    mine.stopped = 1;
    if (!freezes) raise(SIGKILL);
    while (mine.go_on == 0) std::this_thread::sleep_for(50us);
  }
  mine.points = passed;
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

// A kind of work that is done a number of times by every rank; writes what came of it to the control block.
struct Work {
  std::string name;
  std::function<void(Communicator&, Background&, Results::Rank&)> run;
  int results;  // how many of took_part it fills
};

// In place, out of place and in the background, of `count` elements.
void AllReduce(Communicator& communicator, Results::Rank& mine, int slot, size_t count, bool in_place) {
  std::vector<float> x(count), y(count);
  for (size_t i = 0; i < count; i++) x[i] = Value(communicator.rank(), i, slot);
  std::vector<float>& out = in_place ? x : y;
  const kf_tensor tensor{x.data(), out.data(), count};
  communicator.Run({Kind::kAllReduce, "x", &tensor, 1, KF_FLOAT32, KF_SUM, 0, nullptr});
  mine.took_part[slot] = MaskOf(out, slot, false);
  mine.participants[slot] = MaskOf(TakeParticipants(communicator));
}

// A step with groups of several sizes, which have to be of one mind.
void Step(Communicator& communicator, Background* background, Results::Rank& mine, int slot, bool in_place = false) {
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
    operations.push_back({Kind::kAllReduce, names[g], &tensors[g], 1, KF_FLOAT32, KF_MEAN, 0, nullptr, {true, 32}});
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
  mine.participants[slot] = MaskOf(TakeParticipants(communicator));
}

// The ranks whose values are in what a gather has given, each in its place and nothing elsewhere; 0: it is no such
// thing.
void AllGather(Communicator& communicator, Results::Rank& mine, int slot, size_t count) {
  const uint32_t size = communicator.size();
  std::vector<float> x(count), all(count * size, -1);
  for (size_t i = 0; i < count; i++) x[i] = Value(communicator.rank(), i, slot);
  communicator.Run(Op(Kind::kAllGather, "g", {{x.data(), all.data(), count}}, KF_FLOAT32));
  uint32_t mask = 0;
  bool whole = true;
  for (uint32_t r = 0; r < size; r++) {
    const bool there = all[r * count] != 0;
    mask |= there ? 1u << r : 0;
    for (size_t i = 0; i < count; i++) whole = whole && all[r * count + i] == (there ? Value(r, i, slot) : 0);
  }
  mine.took_part[slot] = mine.participants[slot] = whole ? mask : 0;
}

void ReduceScatter(Communicator& communicator, Results::Rank& mine, int slot, size_t count) {
  const uint32_t size = communicator.size();
  std::vector<float> x(count * size), part(count);
  for (size_t i = 0; i < x.size(); i++) x[i] = Value(communicator.rank(), i % count, slot);
  communicator.Run(Op(Kind::kReduceScatter, "s", {{x.data(), part.data(), x.size()}}, KF_FLOAT32));
  mine.took_part[slot] = mine.participants[slot] = MaskOf(part, slot, false);
}

void Broadcast(Communicator& communicator, Results::Rank& mine, int slot, size_t count) {
  const uint32_t root = uint32_t(slot) % communicator.size();
  std::vector<float> x(count);
  for (size_t i = 0; i < count; i++) x[i] = Value(communicator.rank(), i, slot);
  try {
    communicator.Run(Op(Kind::kBroadcast, "b", {{x.data(), x.data(), count}}, KF_FLOAT32, KF_SUM, root));
    mine.took_part[slot] = MaskOf(x, slot, false) == 1u << root ? 1u << root : 0;
  } catch (const Error& error) {
    if (error.status() != KF_PEER_LOST || std::strstr(error.what(), "its root") == nullptr) throw;
    mine.took_part[slot] = kRootLost;
  }
  mine.participants[slot] = mine.took_part[slot];
}

// No rank passes before every member has come.
void Barrier(Communicator& communicator, Results::Rank& mine, int slot) {
  results->arrived[slot].fetch_or(1u << communicator.rank());
  communicator.Run(Op(Kind::kBarrier, "w", {}, KF_UINT8));
  mine.took_part[slot] = mine.participants[slot] = results->arrived[slot].load();
}

// The last rank brings another number of elements, and as a rule in another protocol, every other time.
void Mismatch(Communicator& communicator, Results::Rank& mine, int slot, size_t count, size_t other) {
  const size_t own = communicator.rank() == communicator.size() - 1 && slot % 2 == 0 ? other : count;
  std::vector<float> x(own), y(own);
  for (size_t i = 0; i < own; i++) x[i] = Value(communicator.rank(), i, slot);
  try {
    communicator.Run(Op(Kind::kAllReduce, "m", {{x.data(), y.data(), own}}, KF_FLOAT32));
    mine.took_part[slot] = MaskOf(y, slot, false);
    mine.participants[slot] = MaskOf(TakeParticipants(communicator));
  } catch (const Error& error) {
    if (error.status() != KF_MISMATCH) throw;
    mine.took_part[slot] = mine.participants[slot] = kMismatch;
  }
}

// Every collective in every protocol: in the mailboxes, at once in a buffer or in all buffers, chunk by chunk, split.
std::vector<Work> Works() {
  std::vector<Work> works;
  const auto three_times = [&](const std::string& name, auto run) {
    works.push_back({name,
                     [=](Communicator& communicator, Background&, Results::Rank& mine) {
                       for (int slot = 0; slot < 3; slot++) run(communicator, mine, slot);
                     },
                     3});
  };
  for (const size_t count : {size_t{2}, size_t{20000}, size_t{160000}, size_t{700000}}) {
    for (const bool in_place : {false, true}) {
      three_times(Text(in_place ? "all_reduce in place of " : "all_reduce of ", count),
                  [=](Communicator& c, Results::Rank& mine, int slot) { AllReduce(c, mine, slot, count, in_place); });
    }
  }
  for (const size_t count : {size_t{2}, size_t{20000}, size_t{160000}, size_t{400000}}) {
    three_times(Text("broadcast of ", count),
                [=](Communicator& c, Results::Rank& mine, int slot) { Broadcast(c, mine, slot, count); });
    three_times(Text("all_gather of ", count),
                [=](Communicator& c, Results::Rank& mine, int slot) { AllGather(c, mine, slot, count); });
    three_times(Text("reduce_scatter of ", count),
                [=](Communicator& c, Results::Rank& mine, int slot) { ReduceScatter(c, mine, slot, count); });
  }
  three_times("barrier", [=](Communicator& c, Results::Rank& mine, int slot) { Barrier(c, mine, slot); });
  for (const auto& [count, other] : {std::pair<size_t, size_t>{2, 3}, {160000, 2}, {2, 160000}, {160000, 300000}}) {
    three_times(
        Text("mismatch of ", count, " and ", other),
        [c = count, o = other](auto& communicator, auto& mine, int slot) { Mismatch(communicator, mine, slot, c, o); });
  }
  for (const bool in_place : {false, true}) {
    works.push_back({in_place ? "step in place" : "step",
                     [=](Communicator& communicator, Background&, Results::Rank& mine) {
                       for (int slot = 0; slot < 2; slot++) Step(communicator, nullptr, mine, slot, in_place);
                     },
                     2});
  }
  works.push_back({"step in the background",
                   [](Communicator& communicator, Background& background, Results::Rank& mine) {
                     for (int slot = 0; slot < 2; slot++) Step(communicator, &background, mine, slot);
                   },
                   2});
  return works;
}

struct Victim {
  uint32_t rank;
  int place;
  bool freezes = false;  // rather than dies: see Hook
};

// A cluster of processes, of which some are to die at given places, and the launcher that sees them die.
class Cluster {
 public:
  Cluster(uint32_t size, const Work& work, const std::vector<Victim>& victims, uint32_t cores = 2, unsigned seed = 0)
      : size_(size), work_(work), victims_(victims), seed_(seed) {
    fd_ = shm::Segment::Create(size, 1, cores, /*recovers=*/true);
    std::memset(static_cast<void*>(results), 0, sizeof *results);
    for (uint32_t rank = 0; rank < size; rank++) {
      const pid_t pid = fork();
      if (pid == 0) Child(rank);
      pids_.push_back(pid);
    }
  }
  ~Cluster() { close(fd_); }

  // Returns a complaint, or nothing if all is as it should be.
  std::string Supervise() {
    shm::SegmentControlBlock launchers(std::make_shared<shm::Segment>(fd_));
    uint32_t alive = (1u << size_) - 1, left = size_, frozen = 0;
    const auto deadline = Clock::now() + 20s;
    std::string complaint;
    // A frozen one goes on at once, a little later, or when the others have ended.
    const auto pause = std::chrono::microseconds(std::array{0, 300, 2000, 30000000}[seed_ % 4]);
    auto go_on = Clock::time_point::max();
    while (left > 0) {
      for (const Victim& victim : victims_) {
        Results::Rank& its = results->ranks[victim.rank];
        if (!victim.freezes || its.stopped == 0 || (frozen >> victim.rank & 1) != 0) continue;
        alive &= ~(1u << victim.rank);
        frozen |= 1u << victim.rank;
        launchers.MarkLost(victim.rank, "can't be killed", /*recover=*/true);
        go_on = Clock::now() + pause;
      }
      if (frozen != 0 && (Clock::now() > go_on || left == uint32_t(__builtin_popcount(frozen)))) {
        for (Results::Rank& each : results->ranks) each.go_on = each.stopped.load();
      }
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
      if (WIFSIGNALED(status) || (frozen >> rank & 1) != 0) {
        alive &= ~(1u << rank);
        frozen &= ~(1u << rank);
        launchers.MarkLost(rank, "was killed by SIGKILL", /*recover=*/true, /*reaped=*/true);
      } else if (WEXITSTATUS(status) != 0) {
        complaint += Text("rank ", rank, " failed: ", results->ranks[rank].failure, "; ");
      }
    }
    for (int slot = 0; slot < work_.results; slot++) {
      std::set<uint32_t> outcomes;
      // A frozen rank may come to the next barrier, which doesn't wait for it, while the others look at the arrivals.
      const uint32_t counted = work_.name == "barrier" ? alive : ~0u;
      for (uint32_t r = 0; r < size_; r++) {
        if ((alive >> r & 1) == 0) continue;
        outcomes.insert(results->ranks[r].took_part[slot] & counted);
        if (results->ranks[r].participants[slot] != results->ranks[r].took_part[slot]) {
          complaint += Text("operation ", slot, ": rank ", r, " has the parts of ", results->ranks[r].took_part[slot],
                            " but takes ", results->ranks[r].participants[slot], " for those who took part; ");
        }
      }
      if (outcomes.size() != 1) complaint += Text("operation ", slot, ": ", outcomes.size(), " different outcomes; ");
      for (const uint32_t mask : outcomes) {
        // A broadcast is that of its root, unless that died in time; operations differ, unless it was the last rank
        // alone.
        const bool differ = work_.name.rfind("mismatch", 0) == 0 && slot % 2 == 0;
        const bool from_root = work_.name.rfind("broadcast", 0) == 0;
        const uint32_t root = 1u << uint32_t(slot) % size_, last = 1u << (size_ - 1);
        const uint32_t all_ranks = (1u << size_) - 1;
        const bool good =
            from_root ? mask == root || (mask == kRootLost && (alive & root) == 0)
            : differ  ? mask == kMismatch || ((alive & last) == 0 && (mask & alive) == alive && (mask & last) == 0)
                      : (mask & alive) == alive && (mask & ~all_ranks) == 0;
        if (!good) complaint += Text("operation ", slot, " has the outcome ", mask, ", alive are ", alive, "; ");
      }
    }
    return complaint;
  }

 private:
  [[noreturn]] void Child(uint32_t rank) {
    my_rank = rank;
    for (const Victim& victim : victims_) {
      if (victim.rank != rank) continue;
      fail_at = victim.place;
      freezes = victim.freezes;
    }
    fault_hook = Hook;
    Results::Rank& mine = results->ranks[rank];
    try {
      HostCommunicator communicator(std::make_shared<shm::Segment>(fd_), rank, "", false, {10000ms, 10000ms});
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
  const std::vector<Victim> victims_;
  const unsigned seed_;
  int fd_;
  std::vector<pid_t> pids_;
};

using Recovery = KilledRanks<Results, results>;

constexpr size_t kMore = 6;  // cases tried after one of each kind of work

// One rank dies, or freezes, is taken for dead and goes on, at each place, which takes long, with
// KUNGFU_KILL_EVERYWHERE in the environment; else at two places of each kind of work, with one number of ranks and
// cores each, and at four places of some more. At least two are left, so that two outcomes could differ.
void ExpectOneOutcomeWhereverOne(bool freezes) {
  struct Case {
    const Work* work;
    uint32_t size;
    uint32_t cores;
  };
  const std::vector<Work> works = Works();
  std::mt19937 random(Seed());
  std::vector<Case> cases, more;  // the first of each kind, the others
  for (const Work& work : works) {
    std::vector<Case> all;
    for (const uint32_t size : {3u, 4u}) {
      for (const uint32_t cores : {2u, 8u}) all.push_back({&work, size, cores});
    }
    std::shuffle(all.begin(), all.end(), random);
    cases.push_back(all[0]);
    more.insert(more.end(), all.begin() + 1, all.end());
  }
  std::shuffle(more.begin(), more.end(), random);
  cases.insert(cases.end(), more.begin(), more.end());
  if (!Everywhere()) cases.resize(works.size() + kMore);
  std::set<std::string> struck;  // kinds of work in which a rank was
  int kills = 0, places = 0, tried = 0;
  for (const Case& each : cases) {
    const bool first = tried < int(works.size());
    tried++;
    Cluster undisturbed(each.size, *each.work, {}, each.cores);
    ASSERT_EQ(undisturbed.Supervise(), "") << each.work->name;
    std::vector<Victim> victims;
    for (uint32_t r = 0; r < each.size; r++) {
      ASSERT_GT(results->ranks[r].points, 0);
      for (int place = 0; place < results->ranks[r].points; place++) victims.push_back({r, place, freezes});
    }
    std::shuffle(victims.begin(), victims.end(), random);
    places += int(victims.size());
    const int enough = first ? 2 : 4;  // a place that it doesn't come to this time doesn't count
    int here = 0;
    for (size_t i = 0; i < victims.size() && (Everywhere() || here < enough); i++) {
      const unsigned seed = random();
      Cluster cluster(each.size, *each.work, {victims[i]}, each.cores, seed);
      ASSERT_EQ(cluster.Supervise(), "") << each.work->name << ", " << each.size << " ranks on " << each.cores
                                         << " cores, rank " << victims[i].rank << " at place " << victims[i].place
                                         << ", seed " << seed;
      here += results->ranks[victims[i].rank].stopped;
    }
    if (here > 0) struck.insert(each.work->name);
    kills += here;
  }
  std::printf("%s at %d of %d places in %zu kinds of work, %d of %zu with numbers of ranks and cores\n",
              freezes ? "frozen" : "killed", kills, places, struck.size(), tried, cases.size());
  EXPECT_EQ(struck.size(), works.size()) << "every kind of work";
}

TEST_F(Recovery, SurvivorsEndEveryOperationAlikeWhereverOneFails) { ExpectOneOutcomeWhereverOne(/*freezes=*/false); }

TEST_F(Recovery, SurvivorsEndEveryOperationAlikeWhereverOneIsGivenUpAndGoesOn) {
  ExpectOneOutcomeWhereverOne(/*freezes=*/true);
}

TEST_F(Recovery, SurvivorsEndEveryOperationAlikeWhereverTwoFail) {
  std::mt19937 random(Seed());
  const std::vector<Work> works = Works();
  // Each kind of work once, whatever time it takes.
  std::vector<const Work*> order;
  for (const Work& work : works) order.push_back(&work);
  std::shuffle(order.begin(), order.end(), random);
  while (order.size() < (Everywhere() ? 3000 : works.size() + kMore)) order.push_back(&works[random() % works.size()]);
  int both = 0;
  for (size_t round = 0; round < order.size(); round++) {
    const uint32_t size = 4 + random() % 2;
    const Work& work = *order[round];
    const uint32_t first = random() % size, second = (first + 1 + random() % (size - 1)) % size;
    const Victim one{first, int(random() % 40), random() % 4 == 0}, two{second, int(random() % 40), random() % 4 == 0};
    Cluster cluster(size, work, {one, two}, 1 + random() % 8, random());
    ASSERT_EQ(cluster.Supervise(), "") << "round " << round << ": " << work.name << ", " << size << " ranks, " << first
                                       << " at " << one.place << (one.freezes ? " (frozen), " : ", ") << second
                                       << " at " << two.place << (two.freezes ? " (frozen)" : "");
    both += results->ranks[first].stopped != 0 && results->ranks[second].stopped != 0 ? 1 : 0;
  }
  std::printf("two struck in one work %d times\n", both);
  EXPECT_GT(both, 0);
}

}  // namespace
}  // namespace kungfu::testing
