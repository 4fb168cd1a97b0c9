// The trace of a process: its events, and what it never does to the process.
#include "base/trace.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ranks.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
constexpr uint64_t kPlenty = 64 << 20;
constexpr uint64_t kRing = 8192;

// An unnamed file with the beginning of a trace.
struct File {
  File() {
    char path[] = "/tmp/kungfu-trace-XXXXXX";
    fd = mkstemp(path);
    unlink(path);
    EXPECT_EQ(write(fd, "[\n", 2), 2);
  }
  ~File() { close(fd); }
  int ForTrace() const { return dup(fd); }
  std::string Text() const {
    std::string text(static_cast<size_t>(lseek(fd, 0, SEEK_END)), '\0');
    EXPECT_EQ(pread(fd, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    return text;
  }
  int fd;
};

std::vector<std::string> LinesOf(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
    lines.push_back(text.substr(at, end - at));
  }
  return lines;
}

// The number behind "key": in a line; -1 if there is none.
double Number(const std::string& line, const std::string& key) {
  const size_t at = line.find("\"" + key + "\":");
  return at == std::string::npos ? -1 : std::atof(line.c_str() + at + key.size() + 3);
}

std::vector<std::string> EventsOf(const std::string& text, const std::string& category) {
  std::vector<std::string> found;
  for (const std::string& line : LinesOf(text)) {
    if (line.find("\"cat\":\"" + category + "\"") != std::string::npos) found.push_back(line);
  }
  return found;
}

// Whether the text is whole lines, all of them events with an end; the last may be the array's.
void ExpectWholeLines(const std::string& text) {
  ASSERT_FALSE(text.empty());
  EXPECT_EQ(text.back(), '\n');
  const std::vector<std::string> lines = LinesOf(text);
  EXPECT_EQ(lines[0], "[");
  for (size_t i = 1; i < lines.size(); i++) {
    const bool is_end = i + 1 == lines.size() && lines[i] == "]";
    const bool is_event = lines[i].substr(0, 7) == "{\"ph\":\"" && lines[i].find("}}") >= lines[i].size() - 3;
    EXPECT_TRUE(is_end || is_event) << lines[i];
  }
}

void AddCopy(uint64_t value) { Trace::Add({1, 2, {value}, Trace::Name("x"), Trace::What::kCopy}); }

TEST(Trace, IsOffUnlessStarted) {
  EXPECT_FALSE(Trace::On());
  const File file;
  Trace::Start(file.ForTrace(), "x", kPlenty);
  EXPECT_TRUE(Trace::On());
  Trace::Stop();
  EXPECT_FALSE(Trace::On());
  ExpectWholeLines(file.Text());
  EXPECT_EQ(LinesOf(file.Text()).back(), "]");
}

// The rings are full most of the time, and wrap: producers wait for room in slots that the writer reads.
TEST(Trace, EventsOfManyThreadsAreWrittenWholeAndInOrder) {
  constexpr off_t kSize = 4 * 4 * kRing * 100;  // more than three rings of each thread
  const File file;
  std::atomic<uint64_t> added{0};
  Trace::Start(file.ForTrace(), "x", kPlenty);
  RethrowFirst(CollectOf(4, [&](uint32_t) {
    uint64_t k = 0;
    while (lseek(file.fd, 0, SEEK_END) < kSize) {
      for (const uint64_t end = k + 1024; k < end; k++) AddCopy(k);
      std::this_thread::sleep_for(100us);
    }
    added += k;
  }));
  Trace::Stop();
  const std::string text = file.Text();
  ExpectWholeLines(text);
  std::map<double, double> last;
  uint64_t written = 0;
  for (const std::string& line : EventsOf(text, "copy")) {
    const auto [at, is_first] = last.try_emplace(Number(line, "tid"), -1);
    ASSERT_GT(Number(line, "bytes"), at->second);
    at->second = Number(line, "bytes");
    written++;
  }
  EXPECT_EQ(last.size(), 4u);
  const double lost = Number(text.substr(text.rfind("kungfu_end")), "lost");
  EXPECT_EQ(static_cast<double>(written) + lost, static_cast<double>(added));
}

TEST(Trace, EventsOfEndedThreadsAreWritten) {
  const File file;
  Trace::Start(file.ForTrace(), "x", kPlenty);
  for (uint64_t k = 0; k < 20; k++) std::thread([k] { AddCopy(k); }).join();
  Trace::Stop();
  EXPECT_EQ(EventsOf(file.Text(), "copy").size(), 20u);
}

// A pipe that nothing reads: the writer hangs in its first write.
struct HungFile {
  HungFile() {
    EXPECT_EQ(pipe(ends), 0);
    fcntl(ends[1], F_SETPIPE_SZ, 4096);
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    const std::string filler(4096, ' ');
    while (write(ends[1], filler.data(), filler.size()) > 0) {
    }
    fcntl(ends[1], F_SETFL, 0);
  }
  int ends[2];
};

TEST(Trace, HungFileBlocksNoCaller) {
  HungFile file;
  Trace::Start(file.ends[1], "x", kPlenty);
  AddCopy(0);
  std::this_thread::sleep_for(300ms);  // the writer hangs now
  std::thread([] {
    for (uint64_t k = 0; k < 2 * kRing; k++) AddCopy(k);
  }).join();
  const auto began = Clock::now();
  Trace::Stop();
  EXPECT_LT(Clock::now() - began, 20s);  // and not for ever
  close(file.ends[0]);                   // the writer gets EPIPE, and ends
  for (int k = 0; k < 30; k++) Trace::Stop();
}

TEST(Trace, FullRingLosesEventsAndCountsThem) {
  signal(SIGPIPE, SIG_IGN);
  HungFile file;
  Trace::Start(file.ends[1], "x", kPlenty);
  AddCopy(0);
  std::this_thread::sleep_for(300ms);
  constexpr uint64_t kAdded = 3 * kRing;
  std::thread adding([] {
    for (uint64_t k = 0; k < kAdded; k++) AddCopy(k);
  });
  adding.join();
  std::string text;
  std::thread reading([&] {
    char some[65536];
    for (ssize_t n; (n = read(file.ends[0], some, sizeof some)) > 0;) text.append(some, static_cast<size_t>(n));
  });
  Trace::Stop();
  reading.join();  // the writer has closed its end
  close(file.ends[0]);
  const size_t at = text.find("\"lost\":");
  ASSERT_NE(at, std::string::npos);
  const double lost = std::atof(text.c_str() + at + 7);
  EXPECT_GE(lost, kAdded - kRing);
  EXPECT_EQ(static_cast<double>(EventsOf(text, "copy").size()) + lost, kAdded + 1);
}

TEST(Trace, FullDiskStopsTheTrace) {
  signal(SIGXFSZ, SIG_IGN);
  const File file;
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 5000;
  setrlimit(RLIMIT_FSIZE, &small);
  Trace::Start(file.ForTrace(), "x", kPlenty);
  for (uint64_t k = 0; k < 20; k++) AddCopy(k);
  const bool has_some = Soon([&] { return !EventsOf(file.Text(), "copy").empty(); });
  for (uint64_t k = 0; k < 1000; k++) AddCopy(k);
  const bool has_stopped = Soon([] { return !Trace::On(); });
  Trace::Stop();
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(has_some);
  EXPECT_TRUE(has_stopped);
  ExpectWholeLines(file.Text());
  EXPECT_EQ(EventsOf(file.Text(), "copy").size(), 20u);
}

TEST(Trace, SizeLimitEndsTheFileWithWholeLines) {
  const File file;
  Trace::Start(file.ForTrace(), "x", 5000);
  for (uint64_t k = 0; k < 1000; k++) AddCopy(k);
  EXPECT_TRUE(Soon([] { return !Trace::On(); }));
  Trace::Stop();
  ExpectWholeLines(file.Text());
  EXPECT_EQ(LinesOf(file.Text()).back(), "]");
  EXPECT_LE(file.Text().size(), 5002u);
  EXPECT_GT(EventsOf(file.Text(), "copy").size(), 20u);
  EXPECT_NE(file.Text().find("\"reason\":\"size limit\""), std::string::npos);
}

TEST(Trace, ForkedChildAddsNothing) {
  const File file;
  Trace::Start(file.ForTrace(), "x", kPlenty);
  AddCopy(0);
  const pid_t child = fork();
  if (child == 0) {
    AddCopy(1);
    Trace::Stop();  // would wait for the writer
    _exit(Trace::Name("y") == 0 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(Trace::On());
  Trace::Stop();
  EXPECT_EQ(EventsOf(file.Text(), "copy").size(), 1u);
}

TEST(Trace, NamesAreEscaped) {
  const File file;
  Trace::Start(file.ForTrace(), "x", kPlenty);
  Trace::AddProgram("a\"b\\c\n\xc3", Trace::Now());
  Trace::Stop();
  EXPECT_NE(file.Text().find("\"name\":\"a\\\"b\\\\c??\""), std::string::npos) << file.Text();
}

TEST(Trace, CollectiveEndsAtEachRankAfterItHasBegunAtAll) {
  const File file;
  Trace::Start(file.ForTrace(), "x", kPlenty);
  Ranks ranks(3);
  ranks.Run([](uint32_t rank, Communicator& communicator) {
    for (int k = 0; k < 5; k++) {
      if (rank == 1) std::this_thread::sleep_for(2ms);
      std::vector<float> values(300000, 1.0f);
      communicator.Run(Op(Kind::kAllReduce, "x", {{values.data(), values.data(), values.size()}}, KF_FLOAT32));
    }
  });
  Trace::Stop();
  const std::vector<std::string> events = EventsOf(file.Text(), "operation");
  ASSERT_EQ(events.size(), 15u);
  // The ranks are threads of one process and count together: n / 3 is nothing to go by, the order in time is.
  std::map<double, int> of_thread;
  std::vector<double> begins(5, 0), ends(5, 1e18);
  for (const std::string& event : events) {
    const size_t k = static_cast<size_t>(of_thread[Number(event, "tid")]++);
    const double begin = Number(event, "ts"), end = begin + Number(event, "dur");
    begins[k] = std::max(begins[k], begin);
    ends[k] = std::min(ends[k], end);
    EXPECT_EQ(Number(event, "bytes"), 1200000);
    EXPECT_EQ(Number(event, "version"), 7);
    EXPECT_LE(Number(event, "waiting_us"), Number(event, "dur"));
  }
  for (size_t k = 0; k < 5; k++) EXPECT_GT(ends[k], begins[k]);
  EXPECT_FALSE(EventsOf(file.Text(), "wait").empty());
}

TEST(Trace, StepHasPartsThatFollowEachOther) {
  const File file;
  Trace::Start(file.ForTrace(), "x", kPlenty);
  Trace::StepBegins();
  Trace::AddProgram("data", Trace::Now());
  const uint64_t data_ended = Trace::Now();
  std::this_thread::sleep_for(2ms);
  std::thread([] { Trace::AddProgram("checkpoint file", Trace::Now()); }).join();  // beside the step
  Trace::ReductionBegins(Trace::Now());
  Trace::ReductionEnds(Trace::Now());
  Trace::StepEnds(3);
  Trace::StepBegins();
  Trace::StepEnds(4);  // without a reduction
  Trace::Stop();
  const auto steps = EventsOf(file.Text(), "step"), parts = EventsOf(file.Text(), "in step");
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(Number(steps[0], "step"), 3);
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_LE(Number(parts[0], "ts"), data_ended / 1e3 + 0.002);
  double at = Number(EventsOf(file.Text(), "program")[0], "ts");
  for (const std::string& part : parts) {
    EXPECT_GE(Number(part, "ts"), at - 0.002);
    at = Number(part, "ts") + Number(part, "dur");
  }
  EXPECT_LE(at, Number(steps[0], "ts") + Number(steps[0], "dur") + 0.002);
}

}  // namespace
}  // namespace kungfu::testing
