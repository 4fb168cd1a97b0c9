// Ranks that wait for each other in different operations, and ranks that only seem to (host/deadlock.h).
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ranks.h"
#include "runtime/stillness.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;

CommunicatorOptions Watched() {
  CommunicatorOptions options{60s, 60s};
  options.watched_after = 0;
  return options;
}

// An operation of a program: its caller waits for it, or goes on while another thread begins it in its turn.
struct Call {
  std::string name;
  bool queued = false;
  int delay_us = 0;  // before it begins
};
using Program = std::vector<Call>;

// One rank's process: a main thread, and one that runs what is queued.
class Process {
 public:
  Process(Communicator& communicator, Program program)
      : communicator_(communicator), program_(std::move(program)), queue_([this] { RunQueue(); }) {}
  ~Process() { queue_.join(); }

  // Throws what an operation of the main thread's throws.
  void RunMain() {
    main_number_ = gettid();
    try {
      for (const Call& call : program_) {
        std::this_thread::sleep_for(std::chrono::microseconds(call.delay_us));
        if (call.queued) {
          const std::lock_guard<std::mutex> guard(mutex_);
          calls_.push_back(call);
          changed_.notify_all();
        } else {
          Run(call.name, main_waits_);
        }
      }
    } catch (...) {
      End();
      throw;
    }
    End();
  }

  // As point 1 of the argument has it: a thread that is about to wait may have no core yet.
  bool StandsStill() {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (!main_waits_ || !(queue_waits_ || (calls_.empty() && !queue_runs_))) return false;
    }
    return Sleeps(main_number_) && Sleeps(queue_number_);
  }

 private:
  static bool Sleeps(pid_t thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::string text;
    std::getline(file, text);
    return text.find(") S ") != std::string::npos;
  }
  void Run(const std::string& name, bool& waits) {
    Set(waits, true);
    try {
      communicator_.Run({Kind::kBarrier, name.c_str()});
    } catch (...) {
      Set(waits, false);
      throw;
    }
    Set(waits, false);
  }
  void Set(bool& word, bool value) {
    const std::lock_guard<std::mutex> guard(mutex_);
    word = value;
  }
  void End() {
    const std::lock_guard<std::mutex> guard(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  void RunQueue() {
    queue_number_ = gettid();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return ended_ || !calls_.empty(); });
      if (calls_.empty()) return;
      const Call call = calls_.front();
      calls_.pop_front();
      queue_runs_ = true;
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(call.delay_us));
      try {
        Run(call.name, queue_waits_);
      } catch (const Error&) {
        // The main thread's next one throws it as well.
      }
      lock.lock();
      queue_runs_ = false;
    }
  }

  Communicator& communicator_;
  const Program program_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<pid_t> main_number_{0}, queue_number_{0};
  std::deque<Call> calls_;
  bool main_waits_ = false, queue_waits_ = false, queue_runs_ = false, ended_ = false;
  std::thread queue_;
};

// What each rank throws that runs its program, while all look for deadlocks.
std::vector<std::exception_ptr> RunAll(const std::vector<Program>& programs, uint32_t seed) {
  Ranks ranks(static_cast<uint32_t>(programs.size()), Watched());
  std::vector<std::unique_ptr<Process>> processes;
  for (uint32_t r = 0; r < ranks.size(); r++) processes.push_back(std::make_unique<Process>(ranks.at(r), programs[r]));
  std::atomic<bool> over{false};
  std::vector<std::thread> lookers;
  for (uint32_t r = 0; r < ranks.size(); r++) {
    lookers.emplace_back([&, r] {
      std::minstd_rand random(seed * 31 + r);
      while (!over) {
        ranks.at(r).LookForDeadlock(processes[r]->StandsStill(), Text("program.py:", r));
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      }
    });
  }
  auto thrown = CollectOf(ranks.size(), [&](uint32_t r) { processes[r]->RunMain(); });
  over = true;
  for (std::thread& looker : lookers) looker.join();
  return thrown;
}

// The same operations in the same order, at other moments.
std::vector<Program> RandomPrograms(std::minstd_rand& random) {
  const uint32_t size = 2 + random() % 3;
  std::vector<Program> programs(size);
  for (uint32_t n = 3 + random() % 6; n > 0; n--) {
    const std::string name(1, static_cast<char>('a' + random() % 3));
    const bool queued = random() % 2 == 0;
    // A name that is queued at one time and called at another could come in another order.
    for (Program& program : programs) {
      program.push_back({name + (queued ? "/queued" : ""), queued, random() % 3 == 0 ? int(random() % 20000) : 0});
    }
  }
  for (Program& program : programs) program.push_back({"end", false, 0});
  return programs;
}

TEST(Deadlock, IsNotFoundInProgramsOfOneOrder) {
  for (uint32_t seed = 1; seed <= 60; seed++) {
    std::minstd_rand random(seed);
    const auto programs = RandomPrograms(random);
    for (const auto& thrown : RunAll(programs, seed)) {
      ASSERT_FALSE(thrown) << "seed " << seed << ": " << ErrorOf(thrown).what();
    }
  }
}

TEST(Deadlock, IsFoundAtAllRanksWhereOneHasAnOperationOfItsOwn) {
  for (uint32_t seed = 1; seed <= 30; seed++) {
    std::minstd_rand random(seed);
    auto programs = RandomPrograms(random);
    const auto other = static_cast<uint32_t>(random() % programs.size());
    Program& its = programs[other];
    const auto at = static_cast<std::ptrdiff_t>(random() % its.size());
    its.insert(its.begin() + at, {"its own", false, 0});
    const auto thrown = RunAll(programs, seed);
    for (const auto& one : thrown) {
      const Error error = ErrorOf(one);
      const std::string text = error.what();
      ASSERT_EQ(error.status(), KF_MISMATCH) << "seed " << seed << ": " << text;
      EXPECT_NE(text.find("barrier \"its own\""), std::string::npos) << text;
      EXPECT_NE(text.find(Text("program.py:", other)), std::string::npos) << text;
    }
  }
}

// Ranks 0 and 1 wait in different operations and look for a deadlock, which none finds before `release` has run.
void ExpectDeadlockAfter(Ranks& ranks, const std::function<void()>& release) {
  std::atomic<bool> over{false};
  std::thread looker([&] {
    while (!over) {
      for (const uint32_t r : {0, 1}) ranks.at(r).LookForDeadlock(true, "");
      std::this_thread::sleep_for(1ms);
    }
  });
  std::atomic<int> ended{0};
  std::thread releases([&] {
    std::this_thread::sleep_for(200ms);
    EXPECT_EQ(ended, 0);
    release();
  });
  const auto thrown = CollectOf(2, [&](uint32_t r) {
    try {
      ranks.at(r).Run({Kind::kBarrier, r == 0 ? "a" : "b"});
    } catch (...) {
      ended++;
      throw;
    }
  });
  releases.join();
  over = true;
  looker.join();
  for (const auto& one : thrown) EXPECT_EQ(ErrorOf(one).status(), KF_MISMATCH) << ErrorOf(one).what();
}

// Rank 2 reports nothing: it may be about to come.
TEST(Deadlock, IsNotConcludedWithoutARankUntilItHasFailed) {
  Ranks ranks(3, Watched(), 2, /*recovers=*/true);
  ExpectDeadlockAfter(ranks, [&] { ranks.control().MarkLost(2, "was killed", /*recover=*/true); });
}

TEST(Deadlock, IsNotConcludedWhileARankIsBusyAlone) {
  Ranks ranks(2, Watched());
  ranks.at(1).SetBusy(true);
  ExpectDeadlockAfter(ranks, [&] { ranks.at(1).SetBusy(false); });
}

// ---- a process

// The caller stands for the main thread.
bool IsStill(Stillness& stillness, const std::vector<pid_t>& waiting = {getpid()}) {
  std::this_thread::sleep_for(30ms);
  return stillness.Look(waiting, /*main_waits=*/false);
}

TEST(Stillness, IsSeenWhereAllThreadsSleep) {
  std::mutex mutex;
  std::condition_variable ends;
  bool end = false;
  std::thread sleeper([&] {
    std::unique_lock<std::mutex> lock(mutex);
    ends.wait(lock, [&] { return end; });
  });
  Stillness stillness;
  EXPECT_TRUE(Soon([&] { return IsStill(stillness); }));
  {
    const std::lock_guard<std::mutex> guard(mutex);
    end = true;
  }
  ends.notify_all();
  sleeper.join();
}

TEST(Stillness, IsNotSeenWhileAThreadComputes) {
  std::atomic<bool> end{false};
  std::thread computes([&] {
    while (!end) {
    }
  });
  Stillness stillness;
  for (int i = 0; i < 10; i++) EXPECT_FALSE(IsStill(stillness));
  end = true;
  computes.join();
}

TEST(Stillness, IsNotSeenWhereTheMainThreadIsNotSaidToWait) {
  Stillness stillness;
  std::thread looker([&] {
    for (int i = 0; i < 5; i++) EXPECT_FALSE(IsStill(stillness, {}));
  });
  looker.join();
}

TEST(Stillness, IsNotSeenWhereNothingCanBeRead) {
  Stillness stillness("/nowhere");
  for (int i = 0; i < 5; i++) EXPECT_FALSE(IsStill(stillness));
}

}  // namespace
}  // namespace kungfu::testing
