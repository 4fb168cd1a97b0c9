// Operations in the background: results, order, errors, abandoned tickets, closing, forks.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <numeric>

#include "ranks.h"
#include "runtime/background.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;

// A rank with a background thread of its own.
struct Worker {
  explicit Worker(Communicator& of) : communicator(&of, [](Communicator*) {}), rank(of.rank()), size(of.size()) {}

  // Values depend on rank, index and `seed`.
  float Value(uint32_t r, size_t i, int seed) const { return float(r + 1) * float(i % 7) + float(seed); }

  // An operation that was started, and where its results are wanted.
  struct Started {
    uint64_t ticket;
    std::vector<float>* output;
  };

  // Starts an all-reduce over two tensors whose inputs are gone right afterwards.
  Started Start(const std::string& name, std::vector<float>* output, int seed) {
    std::vector<float> input(output->size());
    for (size_t i = 0; i < input.size(); i++) input[i] = Value(rank, i, seed);
    return {
        background.Start(communicator, Op(Kind::kAllReduce, name.c_str(), Halves(input.data(), output), KF_FLOAT32)),
        output};
  }
  void Wait(const std::vector<Started>& all) {
    std::vector<std::vector<kf_tensor>> tensors;
    std::vector<kf_started> started;
    tensors.reserve(all.size());
    for (const Started& each : all) {
      tensors.push_back(Halves(each.output->data(), each.output));
      started.push_back({each.ticket, tensors.back().data(), 2});
    }
    background.Wait(started.data(), started.size());
  }
  static std::vector<kf_tensor> Halves(float* input, std::vector<float>* output) {
    const size_t half = output->size() / 2;
    return {{input, output->data(), half}, {input + half, output->data() + half, output->size() - half}};
  }
  void Check(const std::vector<float>& output, int seed) const {
    for (size_t i = 0; i < output.size(); i++) {
      float expected = 0;
      for (uint32_t r = 0; r < size; r++) expected += Value(r, i, seed);
      ASSERT_EQ(output[i], expected) << "element " << i;
    }
  }

  std::shared_ptr<Communicator> communicator;  // belongs to Ranks
  uint32_t rank, size;
  Background background;
};

Error WaitError(Worker& worker, const std::vector<Worker::Started>& tickets) {
  try {
    worker.Wait(tickets);
  } catch (const Error& error) {
    return error;
  }
  return Error(KF_OK, "nothing was thrown");
}

TEST(Background, ReducesWhatWasBroughtAtTheStartOverManyStepsAndSizes) {
  for (const uint32_t size : {1u, 2u, 3u, 4u}) {
    Ranks ranks(size);
    ranks.Run([](uint32_t rank, Communicator& communicator) {
      Worker worker(communicator);
      for (int step = 0; step < 20; step++) {
        std::vector<std::vector<float>> outputs;
        for (const size_t count : {size_t{1}, size_t{0}, size_t{70001}, size_t(step)})
          outputs.emplace_back(count, -1.f);
        if (step == 10) outputs[2].resize(150000);  // the memory that is kept has to grow
        std::vector<Worker::Started> tickets;
        for (size_t g = 0; g < outputs.size(); g++) {
          tickets.push_back(worker.Start("group/" + std::to_string(g), &outputs[g], step + int(g)));
          EXPECT_EQ(tickets.back().ticket == 0, worker.size == 1);
        }
        // Some operations have ended when they are waited for, others have not begun.
        if (step % 4 == int(rank)) std::this_thread::sleep_for(2ms);
        worker.Wait(tickets);
        for (size_t g = 0; g < outputs.size(); g++) worker.Check(outputs[g], step + int(g));
      }
    });
  }
}

TEST(Background, OutputsAreLeftAloneUntilTheyAreWaitedFor) {
  Ranks ranks(2);
  ranks.Run([](uint32_t, Communicator& communicator) {
    Worker worker(communicator);
    std::vector<float> output(1000, -1.f);
    const auto ticket = worker.Start("x", &output, 3);
    std::vector<float> other(1, -1.f);
    worker.Wait({worker.Start("y", &other, 1)});  // hence "x" has ended, too
    EXPECT_EQ(output, std::vector<float>(1000, -1.f));
    worker.Wait({ticket});
    worker.Check(output, 3);
  });
}

TEST(Background, MeetsBlockingCallsOfTheSameOrder) {
  Ranks ranks(3);
  ranks.Run([](uint32_t rank, Communicator& communicator) {
    Worker worker(communicator);
    for (int step = 0; step < 10; step++) {
      std::vector<std::vector<float>> outputs(3, std::vector<float>(5000));
      std::vector<Worker::Started> tickets;
      for (int g = 0; g < 3; g++) {
        const std::string name = "g" + std::to_string(g);
        tickets.push_back(worker.Start(name, &outputs[g], step));
        if (rank == 1) worker.Wait({tickets.back()});
      }
      if (rank != 1) worker.Wait(tickets);
      for (const auto& output : outputs) worker.Check(output, step);
    }
  });
}

TEST(Background, AMismatchReachesTheWaiterAtEveryRankAndTheNextStepWorks) {
  Ranks ranks(3);
  ranks.Run([](uint32_t rank, Communicator& communicator) {
    Worker worker(communicator);
    for (int step = 0; step < 5; step++) {
      std::vector<float> a(100), b(rank == 2 ? 101 : 100), c(100);
      std::vector<Worker::Started> tickets = {worker.Start("a", &a, 1), worker.Start("b", &b, 2),
                                              worker.Start("c", &c, 3)};
      const Error error = WaitError(worker, tickets);
      EXPECT_EQ(error.status(), KF_MISMATCH) << error.what();
      EXPECT_NE(std::string(error.what()).find("\"b\""), std::string::npos) << error.what();
      b.resize(100);
      tickets = {worker.Start("a", &a, 4), worker.Start("b", &b, 5)};
      worker.Wait(tickets);
      worker.Check(a, 4);
      worker.Check(b, 5);
    }
  });
}

TEST(Background, AnAbandonedTicketRunsAllTheSameWritesNothingAndIsVoid) {
  Ranks ranks(2);
  ranks.Run([](uint32_t rank, Communicator& communicator) {
    Worker worker(communicator);
    std::vector<float> output(70000);
    for (int step = 0; step < 20; step++) {
      Worker::Started abandoned{};
      {
        std::vector<float> freed(70000);  // Rank 1's step fails: it does not wait, and its output is gone
        abandoned = worker.Start("x", &freed, step);
        if (rank == 0) worker.Wait({abandoned});
        if (rank == 0) worker.Check(freed, step);
      }
      worker.Wait({worker.Start("x", &output, 100 + step)});
      worker.Check(output, 100 + step);
      EXPECT_EQ(WaitError(worker, {{abandoned.ticket, &output}}).status(), KF_INVALID);
    }
    worker.Start("x", &output, 0);  // and one that is left at the end
  });
}

TEST(Background, BadInputIsRefusedAtTheStart) {
  Ranks ranks(2);
  Worker worker(ranks.at(0));
  float x = 0;
  const auto start = [&](Operation operation) { worker.background.Start(worker.communicator, operation); };
  EXPECT_THROW(start(Op(Kind::kAllReduce, "", {{&x, &x, 1}}, KF_FLOAT32)), Error);
  EXPECT_THROW(start(Op(Kind::kAllReduce, "x", {{nullptr, &x, 1}}, KF_FLOAT32)), Error);
  EXPECT_THROW(start(Op(Kind::kAllReduce, "x", {{&x, &x, 1}}, static_cast<kf_dtype>(15))), Error);
  EXPECT_THROW(start(Op(Kind::kBroadcast, "x", {{&x, &x, 1}}, KF_FLOAT32)), Error);
}

TEST(Background, AWaitWithOtherTensorsIsRefused) {
  Ranks ranks(2);
  ranks.Run([](uint32_t, Communicator& communicator) {
    Worker worker(communicator);
    std::vector<float> output(10), other(11);
    auto started = worker.Start("x", &output, 0);
    EXPECT_EQ(WaitError(worker, {{started.ticket, &other}}).status(), KF_INVALID);
    worker.Wait({started});
    worker.Check(output, 0);
    EXPECT_EQ(WaitError(worker, {started}).status(), KF_INVALID);
  });
}

TEST(Background, TheDeadlineIsTheCollectivesOwn) {
  Ranks ranks(2, {200ms, 10s});
  Worker worker(ranks.at(0));
  std::vector<float> first(10), second(10);
  const std::vector<Worker::Started> tickets = {worker.Start("lonely", &first, 0), worker.Start("later", &second, 0)};
  const Error error = WaitError(worker, tickets);
  EXPECT_EQ(error.status(), KF_TIMEOUT);
  EXPECT_STREQ(error.what(),
               "all_reduce \"lonely\": no data from rank 1 (127.0.0.1:10001) within 0.2 s, cluster version 7");
}

TEST(Background, ClosingTheCommunicatorEndsWhatIsQueuedAndANewOneWorks) {
  Ranks before(2);
  Ranks after(2);
  Worker worker(before.at(0));
  std::vector<float> x(10), y(10), z(10);
  std::vector<Worker::Started> tickets = {worker.Start("x", &x, 0), worker.Start("y", &y, 0)};
  before.at(0).Close(KF_STALE, "the cluster is at version 8");
  const Error error = WaitError(worker, tickets);
  EXPECT_EQ(error.status(), KF_STALE);
  EXPECT_STREQ(error.what(), "the cluster is at version 8");

  std::thread other([&] {
    Worker second(after.at(1));
    std::vector<float> output(10);
    second.Wait({second.Start("x", &output, 0)});
  });
  worker.communicator.reset(&after.at(0), [](Communicator*) {});
  worker.Wait({worker.Start("x", &z, 0)});
  worker.Check(z, 0);
  other.join();
}

// Both have ended well, in two cluster versions: what survivors have to agree on is of one.
TEST(Background, OperationsOfTwoVersionsAreNotAwaitedTogether) {
  Ranks before(2), after(2);
  const auto run = [&](uint32_t rank) {
    Worker worker(before.at(rank));
    std::vector<float> x(10), y(10), z(10);
    const auto first = worker.Start("x", &x, 0);
    const auto kept = worker.communicator;  // as another thread of the program may
    worker.communicator.reset(&after.at(rank), [](Communicator*) {});
    const auto second = worker.Start("y", &y, 0);
    const Error error = WaitError(worker, {first, second});
    EXPECT_EQ(error.status(), KF_STALE) << error.what();
    worker.Wait({worker.Start("z", &z, 0)});
    worker.Check(z, 0);
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
}

TEST(Background, StopEndsTheThreadAndAStartBringsItBack) {
  Ranks ranks(2);
  ranks.Run([](uint32_t, Communicator& communicator) {
    Worker worker(communicator);
    for (int i = 0; i < 5; i++) {
      std::vector<float> output(10);
      worker.Wait({worker.Start("x", &output, i)});
      worker.Check(output, i);
      worker.background.Stop();
      worker.background.Stop();
    }
  });
}

TEST(Background, AStopBesideAStartNeitherHangsNorLeavesTwoThreads) {
  Ranks ranks(2);
  ranks.Run([](uint32_t, Communicator& communicator) {
    Worker worker(communicator);
    std::atomic<bool> done{false};
    std::thread stopper([&] {
      while (!done) worker.background.Stop();
    });
    for (int i = 0; i < 300; i++) {
      std::vector<float> first(10), second(10);
      worker.Wait({worker.Start("x", &first, i), worker.Start("y", &second, i)});
      worker.Check(first, i);
      worker.Check(second, i);
    }
    done = true;
    stopper.join();
  });
}

TEST(Background, AForkedChildStartsNothingAndEndsItself) {
  Ranks ranks(2);
  ranks.Run([](uint32_t rank, Communicator& communicator) {
    Worker worker(communicator);
    std::vector<float> output(10);
    worker.Wait({worker.Start("x", &output, 0)});
    if (rank != 0) return;
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      kf_status status = KF_OK;
      try {
        worker.Start("x", &output, 1);
      } catch (const Error& error) {
        status = error.status();
      }
      worker.background.Stop();
      _exit(status == KF_INVALID ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  });
}

TEST(Background, AnIdleThreadSleeps) {
  Ranks ranks(2);
  ranks.Run([](uint32_t rank, Communicator& communicator) {
    Worker worker(communicator);
    std::vector<float> output(10);
    worker.Wait({worker.Start("x", &output, 0)});
    if (rank != 0) return;
    const auto used = [] {
      rusage usage{};
      getrusage(RUSAGE_SELF, &usage);
      return std::chrono::seconds(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
             std::chrono::microseconds(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
    };
    const auto before = used();
    std::this_thread::sleep_for(300ms);
    EXPECT_LT(used() - before, 30ms);
  });
}

}  // namespace
}  // namespace kungfu::testing
