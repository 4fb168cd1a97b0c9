#include "base/trace.h"

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/forks.h"
#include "base/log.h"
#include "base/threads.h"

namespace kungfu {

thread_local uint64_t Trace::waited_ns_ = 0;

namespace {

constexpr auto kInterval = std::chrono::milliseconds(100);
constexpr auto kStopLimit = std::chrono::seconds(1);
constexpr uint64_t kRingEvents = 8192;  // 512 KiB; pages that hold no event are never touched
constexpr uint64_t kLeastWaitNs = 10000;
constexpr uint32_t kMostNames = 10000;
constexpr size_t kMostOfName = 200;
constexpr size_t kEndBytes = 256;   // space for the last line of the file
constexpr size_t kWaiting = 3;      // the index of the waiting time in an event's values
constexpr uint64_t kStepTrack = 1;  // the track of the steps; no thread has this number

struct Ring {
  Ring() {
    char own[16] = {};
    prctl(PR_GET_NAME, own);
    name = own;
  }
  const long thread = syscall(SYS_gettid);
  std::string name;
  uint32_t introduced = 0;  // the last trace (by number) to which the writer has added this ring's name; used only by
                            // the writer
  std::array<Trace::Event, kRingEvents> events;
  alignas(64) std::atomic<uint64_t> pushed{0};
  std::atomic<uint64_t> lost{0};
  std::atomic<bool> retired{false};
  alignas(64) std::atomic<uint64_t> taken{0};
};

// A thread's reference to its ring. When the thread ends, it retires the ring.
struct OwnRing {
  ~OwnRing() {
    if (ring != nullptr) ring->retired.store(true, std::memory_order_release);
  }
  std::shared_ptr<Ring> ring;
};
thread_local OwnRing own_ring;
thread_local bool trains = false;  // true for the thread that runs the training steps

void Append(std::string& text, uint64_t number) {
  char digits[20];
  text.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

// Appends a time to `text` as microseconds with three decimals.
void AppendUs(std::string& text, uint64_t ns) {
  Append(text, ns / 1000);
  const auto rest = static_cast<uint32_t>(ns % 1000);
  const char decimals[] = {'.', char('0' + rest / 100), char('0' + rest / 10 % 10), char('0' + rest % 10)};
  text.append(decimals, sizeof decimals);
}

std::string Escaped(std::string_view name) {
  std::string escaped;
  for (const char c : name.substr(0, kMostOfName)) {
    if (c == '"' || c == '\\') escaped += '\\';
    escaped += static_cast<unsigned char>(c) < ' ' || static_cast<unsigned char>(c) > '~' ? '?' : c;
  }
  return escaped;
}

struct Format {
  const char* category;
  std::array<const char*, 4> values;  // the names of the values; null for a value that isn't written
  bool on_step_track;
};
const Format& FormatOf(Trace::What what) {
  static constexpr Format kFormats[] = {
      {"operation", {"bytes", "n", "version", "waiting_us"}, false},
      {"part", {"bytes", nullptr, nullptr, "waiting_us"}, false},
      {"wait", {"rank", nullptr, nullptr, nullptr}, false},
      {"wait", {nullptr, nullptr, nullptr, nullptr}, false},
      {"copy", {"bytes", nullptr, nullptr, nullptr}, false},
      {"program", {nullptr, nullptr, nullptr, nullptr}, false},
      {"step", {"step", nullptr, nullptr, nullptr}, true},
      {"in step", {nullptr, nullptr, nullptr, nullptr}, true},
      {"member", {"version", "rank", "size", nullptr}, false},
  };
  return kFormats[static_cast<size_t>(what)];
}

}  // namespace

// The state of the trace. Never destroyed, because threads may outlive static destructors.
class TraceFile {
 public:
  static TraceFile& Get() {
    static TraceFile* const file = new TraceFile;
    return *file;
  }

  void Start(int fd, const std::string& path, uint64_t max_bytes) {
    if (started_.load(std::memory_order_acquire) && IsCopy()) {
      close(fd);
      return;
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!ended_) {
      close(fd);
      return;
    }
    stopping_ = ended_ = failed_ = false;
    number_++;
    fd_ = fd;
    path_ = path;
    const off_t at = lseek(fd, 0, SEEK_CUR);
    written_ = at < 0 ? 0 : static_cast<uint64_t>(at);
    limit_ = written_ + std::max<uint64_t>(max_bytes, kEndBytes);
    if (process_ == nullptr) process_ = std::make_unique<OneProcess>();
    prefix_ = Text("\"pid\":", getpid(), ",\"tid\":");
    try {
      StartThread("kungfu-trace", [this] { Run(); }).detach();
    } catch (const std::exception& error) {
      ended_ = true;
      close(fd);
      LogSometimes(Text("trace stopped: path=", path_, " reason=\"", error.what(), "\". The job continues"));
      return;
    }
    started_.store(true, std::memory_order_release);
    Trace::on_.store(true, std::memory_order_release);
  }

  void Stop() {
    if (!started_.load(std::memory_order_acquire) || IsCopy()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    Trace::on_.store(false, std::memory_order_relaxed);
    stopping_ = true;
    news_.notify_all();
    news_.wait_for(lock, kStopLimit, [this] { return ended_; });
  }

  // In a forked child, a copied mutex may be locked by a thread that doesn't exist there. So
  // callers check for a forked child before they take a lock.
  bool IsCopy() const { return process_->IsCopy(); }

  uint32_t Name(const std::string& name, uint64_t version, uint64_t* n) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = numbers_.find(name);
    Numbered* numbered = nullptr;
    if (found != numbers_.end()) {
      numbered = &found->second;
    } else if (names_.size() < kMostNames) {
      numbered = &numbers_[name];
      numbered->number = static_cast<uint32_t>(names_.size());
      names_.push_back(Escaped(name));
    } else {
      return 0;
    }
    if (n != nullptr) {
      if (numbered->version != version) *numbered = {numbered->number, version, 0};
      *n = numbered->ended++;
    }
    return numbered->number;
  }

  void Add(const Trace::Event& event) {
    if (own_ring.ring == nullptr) {
      own_ring.ring = std::make_shared<Ring>();
      const std::lock_guard<std::mutex> guard(mutex_);
      rings_.push_back(own_ring.ring);
    }
    Ring& ring = *own_ring.ring;
    const uint64_t pushed = ring.pushed.load(std::memory_order_relaxed);
    if (pushed - ring.taken.load(std::memory_order_acquire) == kRingEvents) {
      ring.lost.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    ring.events[pushed % kRingEvents] = event;
    ring.pushed.store(pushed + 1, std::memory_order_release);
  }

  // The times that `Trace::StepBegins` and the functions after it record.
  std::atomic<uint64_t> step_began{0}, first_reduction{0}, last_reduction{0}, computing_from{0}, other_work_ended{0};

 private:
  struct Numbered {
    uint32_t number = 0;
    uint64_t version = 0;
    uint64_t ended = 0;
  };

  void Run() {
    std::vector<std::shared_ptr<Ring>> rings;
    std::vector<std::string> names;
    uint64_t lost = 0;
    bool stops = false, fits = true;
    while (!stops && fits) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        news_.wait_for(lock, kInterval, [this] { return stopping_; });
        stops = stopping_;
        rings = rings_;
      }
      text_.clear();
      std::vector<std::shared_ptr<Ring>> over;
      for (const auto& ring : rings) {
        const bool retired = ring->retired.load(std::memory_order_acquire);
        const uint64_t pushed = ring->pushed.load(std::memory_order_acquire);
        {
          // By now, all names used by the events before `pushed` exist.
          const std::lock_guard<std::mutex> guard(mutex_);
          names.insert(names.end(), names_.begin() + static_cast<std::ptrdiff_t>(names.size()), names_.end());
        }
        Introduce(*ring);
        for (uint64_t at = ring->taken.load(std::memory_order_relaxed); at < pushed; at++) {
          Write(ring->events[at % kRingEvents], *ring, names);
        }
        ring->taken.store(pushed, std::memory_order_release);
        lost += ring->lost.exchange(0, std::memory_order_relaxed);
        if (retired) over.push_back(ring);
      }
      {
        const std::lock_guard<std::mutex> guard(mutex_);
        for (const auto& ring : over) rings_.erase(std::find(rings_.begin(), rings_.end(), ring));
      }
      fits = Flush();
    }
    Trace::on_.store(false, std::memory_order_relaxed);
    if (!failed_) End(lost, !fits);
    close(fd_);
    const std::lock_guard<std::mutex> guard(mutex_);
    for (const auto& ring : rings_) {  // drop events that this trace hasn't written, so that the next trace doesn't
                                       // write them
      ring->taken.store(ring->pushed.load(std::memory_order_acquire), std::memory_order_release);
      ring->lost.store(0, std::memory_order_relaxed);
    }
    ended_ = true;
    news_.notify_all();
  }

  void Introduce(Ring& ring) {
    if (ring.introduced == number_) return;
    ring.introduced = number_;
    text_ += "{\"ph\":\"M\",\"name\":\"thread_name\"," + prefix_;
    Append(text_, static_cast<uint64_t>(ring.thread));
    text_ += ",\"args\":{\"name\":\"" + Escaped(ring.name) + "\"}},\n";
  }

  void Write(const Trace::Event& event, const Ring& ring, const std::vector<std::string>& names) {
    const Format& format = FormatOf(event.what);
    const bool is_instant = event.what == Trace::What::kMember;
    text_ += is_instant ? "{\"ph\":\"i\",\"s\":\"p\",\"cat\":\"" : "{\"ph\":\"X\",\"cat\":\"";
    text_ += format.category;
    text_ += "\",\"name\":\"";
    text_ += names[event.name];
    text_ += "\",";
    text_ += prefix_;
    Append(text_, format.on_step_track ? kStepTrack : static_cast<uint64_t>(ring.thread));
    text_ += ",\"ts\":";
    AppendUs(text_, event.begin_ns);
    if (!is_instant) {
      text_ += ",\"dur\":";
      AppendUs(text_, event.end_ns - std::min(event.begin_ns, event.end_ns));
    }
    text_ += ",\"args\":{";
    bool is_first = true;
    for (size_t k = 0; k < format.values.size(); k++) {
      if (format.values[k] == nullptr) continue;
      text_ += std::exchange(is_first, false) ? "\"" : ",\"";
      text_ += format.values[k];
      text_ += "\":";
      k == kWaiting ? AppendUs(text_, event.values[k]) : Append(text_, event.values[k]);
    }
    text_ += "}},\n";
  }

  // Writes as many whole lines of `text_` as fit into the file. Returns false if the trace has
  // ended.
  bool Flush() {
    const bool fits = written_ + text_.size() + kEndBytes <= limit_;
    if (!fits) {
      const uint64_t room = limit_ - std::min(limit_, written_ + kEndBytes);
      const size_t end = room == 0 ? std::string::npos : text_.rfind('\n', static_cast<size_t>(room) - 1);
      text_.resize(end == std::string::npos ? 0 : end + 1);
    }
    if (!WriteAll()) return false;
    if (!fits) LogSometimes(Text("trace stopped: path=", path_, " bytes=", written_, " reason=\"size limit\""));
    return fits;
  }

  bool WriteAll() {
    for (size_t at = 0; at < text_.size();) {
      const ssize_t n = write(fd_, text_.data() + at, text_.size() - at);
      if (n < 0 && errno == EINTR) continue;
      if (n > 0) {
        at += static_cast<size_t>(n);
        continue;
      }
      const char* const why = std::strerror(n < 0 ? errno : EIO);
      [[maybe_unused]] const int cut = ftruncate(fd_, static_cast<off_t>(written_));
      LogSometimes(Text("trace stopped: path=", path_, " reason=\"", why, "\". The job continues"));
      failed_ = true;
      return false;
    }
    written_ += text_.size();
    return true;
  }

  void End(uint64_t lost, bool is_cut) {
    text_ = "{\"ph\":\"M\",\"name\":\"kungfu_end\"," + prefix_ + "0,\"args\":{\"lost\":";
    Append(text_, lost);
    if (is_cut) text_ += ",\"reason\":\"size limit\"";
    text_ += "}}\n]\n";
    WriteAll();
  }

  std::atomic<bool> started_{false};
  // These members are set before `started_` and `on_` are set and the writer starts.
  int fd_ = -1;
  std::string path_, prefix_;
  uint64_t limit_ = 0;
  uint32_t number_ = 0;
  std::unique_ptr<OneProcess> process_;
  // Only the writer thread uses these members.
  uint64_t written_ = 0;
  std::string text_;
  bool failed_ = false;

  std::mutex mutex_;
  std::condition_variable news_;
  // Guarded by mutex_:
  bool stopping_ = false, ended_ = true;
  std::vector<std::shared_ptr<Ring>> rings_;
  std::unordered_map<std::string, Numbered> numbers_;
  std::vector<std::string> names_{"(other)"};
};

void Trace::Start(int fd, const std::string& path, uint64_t max_bytes) { TraceFile::Get().Start(fd, path, max_bytes); }

void Trace::Stop() noexcept {
  try {
    TraceFile::Get().Stop();
  } catch (...) {  // the mutex failed; ignored because the process is ending
  }
}

uint32_t Trace::Name(const std::string& name) noexcept {
  try {
    return TraceFile::Get().IsCopy() ? 0 : TraceFile::Get().Name(name, 0, nullptr);
  } catch (...) {  // no memory
    return 0;
  }
}

uint32_t Trace::NameOperation(const std::string& name, uint64_t version, uint64_t* n) noexcept {
  try {
    return TraceFile::Get().IsCopy() ? 0 : TraceFile::Get().Name(name, version, n);
  } catch (...) {
    return 0;
  }
}

void Trace::Add(const Event& event) noexcept {
  try {
    if (On() && !TraceFile::Get().IsCopy()) TraceFile::Get().Add(event);
  } catch (...) {  // no memory for a ring
  }
}

void Trace::AddWait(uint64_t began_ns, uint32_t rank) noexcept {
  const uint64_t now = Now();
  waited_ns_ += now - began_ns;
  if (now - began_ns < kLeastWaitNs) return;
  static const uint32_t of_rank = Name("wait for rank"), of_hosts = Name("wait for other hosts");
  const bool is_rank = rank != kOtherHosts;
  Add({began_ns, now, {rank}, is_rank ? of_rank : of_hosts, is_rank ? What::kWait : What::kHostWait});
}

void Trace::AddProgram(const std::string& name, uint64_t began_ns) noexcept {
  const uint64_t now = Now();
  Add({began_ns, now, {}, Name(name), What::kProgram});
  OtherWorkEnds(now);
}

void Trace::StepBegins() noexcept {
  if (!On()) return;
  trains = true;
  TraceFile& file = TraceFile::Get();
  file.step_began.store(Now(), std::memory_order_relaxed);
  file.first_reduction.store(0, std::memory_order_relaxed);
}

void Trace::ReductionBegins(uint64_t now_ns) noexcept {
  TraceFile& file = TraceFile::Get();
  uint64_t none = 0;
  if (file.first_reduction.load(std::memory_order_relaxed) != 0) return;
  if (!file.first_reduction.compare_exchange_strong(none, now_ns, std::memory_order_relaxed)) return;
  file.computing_from.store(file.other_work_ended.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

void Trace::ReductionEnds(uint64_t now_ns) noexcept {
  TraceFile::Get().last_reduction.store(now_ns, std::memory_order_relaxed);
}

void Trace::OtherWorkEnds(uint64_t now_ns) noexcept {
  if (trains) TraceFile::Get().other_work_ended.store(now_ns, std::memory_order_relaxed);
}

void Trace::StepEnds(uint64_t step) noexcept {
  if (!On()) return;
  TraceFile& file = TraceFile::Get();
  const uint64_t began = file.step_began.load(std::memory_order_relaxed), ended = Now();
  if (began == 0) return;
  Add({began, ended, {step}, Name("step"), What::kStep});
  // The events within the step must not overlap, even if a thread continued past the end of the
  // step. So each event begins where the previous one ends.
  const uint64_t first = std::min(ended, file.first_reduction.load(std::memory_order_relaxed));
  if (first < began) return;  // the step has reduced no gradients
  const uint64_t from = std::clamp(file.computing_from.load(std::memory_order_relaxed), began, first);
  const uint64_t last = std::clamp(file.last_reduction.load(std::memory_order_relaxed), first, ended);
  Add({from, first, {}, Name("compute"), What::kInStep});
  Add({first, last, {}, Name("reductions"), What::kInStep});
  Add({last, ended, {}, Name("after reductions"), What::kInStep});
}

}  // namespace kungfu
