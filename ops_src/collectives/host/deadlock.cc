// The numbers in comments refer to the invariants in deadlock.h.
#include "collectives/host/deadlock.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "collectives/traffic.h"

namespace kungfu::host {
namespace {

// Reports that are older than this are ignored. An idle process renews its report with every call
// of Look.
constexpr uint64_t kFreshNs = 1'000'000'000;

uint64_t NowNs() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

pid_t ThreadNumber() {
  thread_local const auto number = static_cast<pid_t>(syscall(SYS_gettid));
  return number;
}

}  // namespace

// ---- waits

DeadlockWatch::Wait::Wait(DeadlockWatch& watch, const Flight& flight) : watch_(watch) {
  if (!watch.works_) return;
  const Operation& asked = AskedFor(flight.operation);
  {
    const std::lock_guard<std::mutex> guard(watch.mutex_);
    watch.waits_.push_back(
        {flight.channel, flight.sequence, flight.generation, Text(NameOf(asked.kind), " \"", asked.name, "\""), this});
    watch.changes_++;
    watch.TakeBack();
  }
  listed_ = true;
  SlowThreads::Get().Enter(ThreadNumber());
}

DeadlockWatch::Wait::~Wait() {
  if (!listed_) return;
  SlowThreads::Get().Leave(ThreadNumber());
  const std::lock_guard<std::mutex> guard(watch_.mutex_);
  auto& waits = watch_.waits_;
  waits.erase(std::find_if(waits.begin(), waits.end(), [this](const Open& open) { return open.of == this; }));
  watch_.changes_++;
  watch_.TakeBack();  // see invariant 4
}

// ---- reports

// For this function and the functions below, the caller must hold `mutex_`.
void DeadlockWatch::TakeBack() {
  if (!reported_) return;
  reported_ = false;
  shm::WaitReport& report = self_.segment.status(self_.rank).wait_report;
  const uint64_t version = report.version.load(std::memory_order_relaxed);
  report.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  report.num_waits.store(0, std::memory_order_relaxed);
  report.version.store(version + 2, std::memory_order_release);
}

void DeadlockWatch::Report(const std::string& place, uint32_t num_failed) {
  shm::WaitReport& report = self_.segment.status(self_.rank).wait_report;
  std::string text;
  for (const Open& open : waits_) text += (text.empty() ? "" : " and ") + open.what;
  std::string where = place;
  if (const auto progress = self_.control.ProgressOf(self_.rank)) {
    where += Text(where.empty() ? "" : ", ", "after step ", progress->step);
  }
  if (!where.empty()) text += Text(" (", where, ")");
  uint64_t words[shm::WaitReport::kTextWords] = {};
  text.copy(reinterpret_cast<char*>(words), sizeof words - 1);

  const uint64_t version = report.version.load(std::memory_order_relaxed);
  report.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  report.since_ns.store(since_ns_, std::memory_order_relaxed);
  report.now_ns.store(NowNs(), std::memory_order_relaxed);
  report.num_failed.store(num_failed, std::memory_order_relaxed);
  report.num_waits.store(waits_.size(), std::memory_order_relaxed);
  for (size_t i = 0; i < waits_.size(); i++) {
    const Open& open = waits_[i];
    report.waits[i].place.store(static_cast<uint64_t>(open.channel) << 32 | open.sequence, std::memory_order_relaxed);
    report.waits[i].generation.store(open.generation, std::memory_order_relaxed);
  }
  for (size_t i = 0; i < shm::WaitReport::kTextWords; i++) report.text[i].store(words[i], std::memory_order_relaxed);
  report.version.store(version + 2, std::memory_order_release);
  reported_ = true;
}

struct DeadlockWatch::Read {
  uint64_t version, since_ns, now_ns, num_failed;
  std::vector<std::pair<uint64_t, uint32_t>> waits;  // for each wait: its place (channel and sequence number), and its
                                                     // generation
  std::string text;
};

// Returns none if the rank has no report, or is writing its report at this moment.
std::optional<DeadlockWatch::Read> DeadlockWatch::ReadOf(uint32_t rank) const {
  const shm::WaitReport& report = self_.segment.status(rank).wait_report;
  Read read{};
  read.version = report.version.load(std::memory_order_acquire);
  read.since_ns = report.since_ns.load(std::memory_order_relaxed);
  read.now_ns = report.now_ns.load(std::memory_order_relaxed);
  read.num_failed = report.num_failed.load(std::memory_order_relaxed);
  const uint64_t num_waits = report.num_waits.load(std::memory_order_relaxed);
  if (num_waits == 0 || num_waits > shm::WaitReport::kMostWaits) return std::nullopt;
  for (uint64_t i = 0; i < num_waits; i++) {
    const uint64_t place = report.waits[i].place.load(std::memory_order_relaxed);
    const auto generation = static_cast<uint32_t>(report.waits[i].generation.load(std::memory_order_relaxed));
    if (place >> 32 >= shm::kChannels || generation > self_.size) return std::nullopt;
    read.waits.emplace_back(place, generation);
  }
  uint64_t words[shm::WaitReport::kTextWords + 1] = {};
  for (size_t i = 0; i < shm::WaitReport::kTextWords; i++) words[i] = report.text[i].load(std::memory_order_relaxed);
  read.text = reinterpret_cast<const char*>(words);
  std::atomic_thread_fence(std::memory_order_acquire);
  const bool whole = (read.version & 1) == 0 && report.version.load(std::memory_order_relaxed) == read.version;
  return whole ? std::make_optional(std::move(read)) : std::nullopt;
}

// ---- conclusions

std::optional<std::string> DeadlockWatch::Look(bool stands_still, const std::string& place) {
  if (!works_) return std::nullopt;
  const std::lock_guard<std::mutex> guard(mutex_);
  const uint32_t num_failed = self_.control.num_failed();
  const uint64_t operations = Traffic::Get().operations();
  if (!stands_still || waits_.empty() || waits_.size() > shm::WaitReport::kMostWaits || changes_ != seen_changes_ ||
      num_failed != seen_num_failed_ || operations != seen_operations_) {
    seen_operations_ = operations;
    seen_changes_ = changes_;
    seen_num_failed_ = num_failed;
    looks_ = 0;
    TakeBack();
    return std::nullopt;
  }
  if (looks_++ == 0) since_ns_ = NowNs();
  if (looks_ < kLooks) return std::nullopt;
  Report(place, num_failed);
  return Conclude(num_failed);
}

// Returns true if a running member hasn't begun the operation at `place` yet (see invariant 5).
bool DeadlockWatch::LacksPost(uint64_t place, uint32_t generation) const {
  const auto channel = static_cast<uint32_t>(place >> 32), sequence = static_cast<uint32_t>(place);
  for (uint32_t r = 0; r < self_.size; r++) {
    const auto is_early = [&] {  // true if the rank failed before this generation, so that it isn't a member
      for (uint32_t d = 0; d < generation; d++) {
        if (self_.control.FailedRank(d) == r) return true;
      }
      return false;
    };
    if (self_.segment.mailbox(channel, r, sequence).sequence.Reached(sequence) || is_early()) continue;
    if (!self_.control.HasFailed(r)) return true;
  }
  return false;
}

std::optional<std::string> DeadlockWatch::Conclude(uint32_t num_failed) const {
  const uint64_t now = NowNs();
  std::vector<std::pair<uint32_t, Read>> reads;
  uint64_t latest_since = 0, earliest_now = UINT64_MAX;
  for (uint32_t r = 0; r < self_.size; r++) {
    if (self_.control.HasFailed(r)) continue;
    if (self_.control.State(r) != RankState::kAttached || self_.control.IsBusy(r)) return std::nullopt;
    auto read = ReadOf(r);
    if (!read || read->num_failed != num_failed || read->now_ns + kFreshNs < now) return std::nullopt;
    latest_since = std::max(latest_since, read->since_ns);
    earliest_now = std::min(earliest_now, read->now_ns);
    reads.emplace_back(r, std::move(*read));
  }
  if (latest_since > earliest_now) return std::nullopt;
  for (const auto& [rank, read] : reads) {
    for (const auto& [place, generation] : read.waits) {
      if (generation > num_failed || !LacksPost(place, generation)) return std::nullopt;
    }
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const auto& [rank, read] : reads) {
    if (self_.segment.status(rank).wait_report.version.load(std::memory_order_acquire) != read.version)
      return std::nullopt;
  }
  if (self_.control.num_failed() != num_failed) return std::nullopt;

  std::vector<std::pair<std::string, std::string>> waiting;  // (what, ranks)
  for (const auto& [rank, read] : reads) {
    const auto same =
        std::find_if(waiting.begin(), waiting.end(), [&, &text = read.text](const auto& w) { return w.first == text; });
    if (same == waiting.end()) {
      waiting.emplace_back(read.text, Text(rank));
    } else {
      same->second += Text(", ", rank);
    }
  }
  std::string message = "the ranks wait for each other in different operations:";
  for (size_t i = 0; i < waiting.size(); i++) {
    message += Text(i == 0 ? " rank " : "; rank ", waiting[i].second, ": ", waiting[i].first);
  }
  return message +
         Text("; every rank must call the same operations in the same order, cluster version ", self_.cluster_version);
}

// ---- slow threads

struct SlowThreads::State {
  std::mutex mutex;
  std::condition_variable entered;
  std::vector<pid_t> threads;  // guarded by mutex
};

SlowThreads& SlowThreads::Get() {
  static SlowThreads* const it = new SlowThreads;
  return *it;
}

SlowThreads::SlowThreads() : state_(*new State) {}

void SlowThreads::Enter(pid_t thread) {
  {
    const std::lock_guard<std::mutex> guard(state_.mutex);
    state_.threads.push_back(thread);
  }
  state_.entered.notify_all();
}

void SlowThreads::Leave(pid_t thread) {
  const std::lock_guard<std::mutex> guard(state_.mutex);
  state_.threads.erase(std::find(state_.threads.begin(), state_.threads.end(), thread));
}

std::vector<pid_t> SlowThreads::All() {
  const std::lock_guard<std::mutex> guard(state_.mutex);
  return state_.threads;
}

void SlowThreads::AwaitOne() {
  std::unique_lock<std::mutex> lock(state_.mutex);
  state_.entered.wait(lock, [&] { return !state_.threads.empty(); });
}

}  // namespace kungfu::host
