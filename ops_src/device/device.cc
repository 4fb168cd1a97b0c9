#include "device/device.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "collectives/dtype.h"

namespace kungfu::device {
namespace {

constexpr uint32_t kPresent = 0x6b66;  // what a dead rank's zeros are told from
constexpr uint32_t kMostReady = 256;
constexpr auto kRound = std::chrono::milliseconds(10);
constexpr auto kDrain = std::chrono::seconds(10);

struct Ready {
  uint64_t key;        // hash of the name
  uint64_t signature;  // hash of what has to be equal
  uint32_t sequence;   // under this name
  uint32_t weight;     // of its rank in a mean; 0: doesn't matter
  uint32_t expired;    // its rank has waited for too long
};
struct Announcement {
  uint32_t present;
  uint32_t count;
  Ready ready[kMostReady];
};
struct Meeting {
  uint32_t present;
  uint32_t choice;       // kf_engine
  uint32_t has_library;  // the engine is there
  char identity[100];    // of host and device
  char why[148];         // there is no library
};
struct Status {
  uint32_t present;
  uint32_t state;
  char text[184];
};
enum State : uint32_t { kRunning = 1, kDone = 2, kFailed = 3 };
struct Complaint {
  char text[256];
};

// What every rank brings, by rank; zeros for the dead.
template <typename T>
std::vector<T> Gather(Communicator& communicator, const char* name, const T& mine) {
  std::vector<T> all(communicator.size());
  std::memset(static_cast<void*>(all.data()), 0, all.size() * sizeof(T));
  const kf_tensor tensor{&mine, all.data(), sizeof(T)};
  Operation gather;
  gather.kind = Kind::kAllGather;
  gather.name = name;
  gather.tensors = &tensor;
  gather.num_tensors = 1;
  gather.dtype = KF_UINT8;
  communicator.Run(gather);
  return all;
}

template <typename T>
uint32_t CountPresent(const std::vector<T>& all) {
  return static_cast<uint32_t>(std::count_if(all.begin(), all.end(), [](const T& x) { return x.present == kPresent; }));
}

// FNV-1a, whose basis and prime these are.
uint64_t Hash(const void* data, size_t bytes, uint64_t hash = 0xcbf29ce484222325) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ at[i]) * 0x100000001b3;
  return hash;
}

// Equal at all ranks if and (but for the hash) only if they bring the same tensors to the same operation.
uint64_t WholeSignatureOf(const Operation& operation) {
  const uint64_t signature = SignatureOf(operation);
  uint64_t hash = Hash(&signature, sizeof signature);
  for (size_t i = 0; i < operation.num_tensors; i++) {
    hash = Hash(&operation.tensors[i].count, sizeof operation.tensors[i].count, hash);
  }
  return hash;
}

bool Reduces(const Operation& operation) { return kungfu::Reduces(operation.kind); }

uint32_t WeightOf(const Operation& operation) {
  const bool counts = operation.weighted && operation.op == KF_MEAN && operation.dtype >= KF_FLOAT16;
  return counts ? operation.weight : 0;
}

std::string BootId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

void Validate(const Operation& operation, uint32_t size) {
  if (operation.name == nullptr || operation.name[0] == '\0') {
    throw Error(KF_INVALID, Text(NameOf(operation.kind), " needs a name that is not empty"));
  }
  const auto who = [&] { return Text(NameOf(operation.kind), " \"", operation.name, "\": "); };
  if (!IsDtype(operation.dtype)) throw Error(KF_TYPE, Text(who(), "no dtype has number ", int(operation.dtype)));
  if (!IsOp(operation.op)) throw Error(KF_INVALID, Text(who(), "no operation has number ", int(operation.op)));
  if (operation.kind == Kind::kBroadcast && operation.root >= size) {
    throw Error(KF_INVALID, Text(who(), "root ", operation.root, " is not in a cluster of ", size));
  }
  RequireRanks(operation, size);
  for (size_t i = 0; i < operation.num_tensors; i++) {
    const kf_tensor& tensor = operation.tensors[i];
    if (tensor.count > 0 && (tensor.input == nullptr || tensor.output == nullptr)) {
      throw Error(KF_INVALID, Text(who(), "tensor ", i, " has no memory"));
    }
    if (operation.kind == Kind::kReduceScatter && tensor.count % size != 0) {
      throw Error(KF_INVALID,
                  Text(who(), "tensor ", i, " has ", tensor.count, " elements, which ", size, " ranks can't share"));
    }
  }
}

}  // namespace

struct Device::Job {
  std::shared_ptr<Communicator> communicator;
  std::string name, layout;
  std::vector<kf_tensor> tensors;
  Operation operation;  // of the above
  uint64_t key = 0;
  uint64_t signature = 0;
  uint32_t sequence = 0;
  std::chrono::steady_clock::time_point since;
  Mark ready;                   // on the caller's stream
  std::unique_ptr<Block> kept;  // the inputs of a reduction in place, for doing it again
  bool by_staging = false;
  std::optional<Error> failure;  // of this rank's device, before the others know

  // Guarded by Device::mutex_:
  bool ended = false;
  std::optional<Error> error;
  uint32_t members = 0;  // that took part
};

struct Device::Session {
  std::shared_ptr<Communicator> communicator;
  uint32_t members = 0;  // ranks that were in the last gather
  bool met = false;
  bool by_staging = false;  // all of it
  std::unique_ptr<Team> team;
};

Device::Device(Driver& driver, Engine* engine, std::string why_no_engine, const Options& options)
    : driver_(driver), engine_(engine), why_no_engine_(std::move(why_no_engine)), options_(options) {}

Device::~Device() {
  std::thread thread;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
    thread = std::move(thread_);
    queued_.notify_all();
  }
  if (thread.joinable()) thread.join();
}

uint64_t Device::Start(std::shared_ptr<Communicator> communicator, const Operation& operation, Stream stream) {
  Validate(operation, communicator->size());
  if (communicator->size() == 1 && options_.engine != KF_ENGINE_VENDOR) {
    RunAlone(operation, stream);
    return 0;
  }
  auto job = std::make_shared<Job>();
  job->communicator = std::move(communicator);
  job->name = operation.name;
  job->layout = operation.layout == nullptr ? "" : operation.layout;
  job->tensors.assign(operation.tensors, operation.tensors + operation.num_tensors);
  job->operation = operation;
  job->operation.name = job->name.c_str();
  job->operation.layout = operation.layout == nullptr ? nullptr : job->layout.c_str();
  job->operation.tensors = job->tensors.data();
  job->key = Hash(job->name.data(), job->name.size());
  job->signature = WholeSignatureOf(job->operation);
  const Place here = driver_.Here();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!place_) place_ = here;
    if (place_->device != here.device) {
      throw Error(KF_INVALID, Text(NameOf(operation.kind), " \"", operation.name, "\": this thread has device ",
                                   here.device, " current, this process uses device ", place_->device));
    }
  }
  job->ready = Mark(driver_, stream);
  EnsureThread(here);
  return Enqueue(std::move(job));
}

// What the communicator of one rank does: the values are the inputs, whatever the operation.
void Device::RunAlone(const Operation& operation, Stream stream) {
  for (size_t i = 0; i < operation.num_tensors; i++) {
    const kf_tensor& tensor = operation.tensors[i];
    if (tensor.count == 0 || tensor.input == tensor.output) continue;
    driver_.Copy(tensor.output, tensor.input, tensor.count * SizeOf(operation.dtype), KF_DEVICE_TO_DEVICE, stream);
  }
}

uint64_t Device::Enqueue(JobPtr job) {
  std::lock_guard<std::mutex> guard(mutex_);
  // One of a step that failed: nobody waits for it any more when the next one under its name starts.
  for (auto each = by_ticket_.begin(); each != by_ticket_.end();) {
    each = each->second->ended && each->second->key == job->key ? by_ticket_.erase(each) : std::next(each);
  }
  if (by_ticket_.size() >= kMostReady || queue_.size() >= kMostReady) {
    throw Error(KF_INVALID,
                Text(kMostReady, " operations are under way, or nobody has waited for them; no more can be"));
  }
  if (sequence_of_.lock() != job->communicator) {
    sequence_.clear();
    sequence_of_ = job->communicator;
  }
  job->sequence = sequence_[job->key]++;
  job->since = std::chrono::steady_clock::now();
  const uint64_t ticket = ++last_ticket_;
  by_ticket_.emplace(ticket, job);
  queue_.push_back(std::move(job));
  queued_.notify_all();
  return ticket;
}

void Device::Wait(const uint64_t* tickets, size_t num_tickets) {
  std::vector<JobPtr> jobs;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (size_t i = 0; i < num_tickets; i++) {
      if (tickets[i] == 0) continue;
      const auto found = by_ticket_.find(tickets[i]);
      if (found == by_ticket_.end()) throw Error(KF_INVALID, Text("there is no operation with ticket ", tickets[i]));
      jobs.push_back(found->second);
      by_ticket_.erase(found);
    }
  }
  for (;;) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (const JobPtr& job : jobs) ended_.wait(lock, [&] { return job->ended; });
    uint32_t fewest = UINT32_MAX;
    for (const JobPtr& job : jobs) {
      if (job->error) throw *job->error;
      fewest = std::min(fewest, job->members);
    }
    // The earlier ones had a rank in them that died before the later ones: they are done again without it, as are those
    // of the other survivors, who know the same.
    std::vector<JobPtr> again;
    for (const JobPtr& job : jobs) {
      if (job->members == fewest) continue;
      if (!Reduces(job->operation)) continue;
      job->ended = false;
      job->by_staging = true;
      again.push_back(job);
    }
    if (again.empty()) return;
    lock.unlock();
    for (const JobPtr& job : again) {
      const uint64_t ticket = Enqueue(job);
      lock.lock();
      by_ticket_.erase(ticket);
      lock.unlock();
    }
  }
}

std::string Device::EngineInUse() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return engine_in_use_;
}

void Device::NoteEngine(const std::string& text) {
  std::lock_guard<std::mutex> guard(mutex_);
  engine_in_use_ = text;
}

void Device::EnsureThread(const Place& place) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (stopping_) throw Error(KF_ABORTED, "the device has been closed");
  if (thread_.joinable()) return;
  sigset_t all, before;  // signals are for the program's own threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this, place] { Loop(place); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Device::Loop(Place place) {
  pthread_setname_np(pthread_self(), "kungfu-device");
  Session session;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    queued_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) break;
    // Those of one communicator: an older one's fail at once, so that they don't come between.
    const auto communicator = queue_.front()->communicator;
    std::vector<JobPtr> mine;
    for (const JobPtr& job : queue_) {
      if (job->communicator == communicator) mine.push_back(job);
    }
    lock.unlock();
    try {
      if (stream_ == nullptr) {
        driver_.Enter(place);
        stream_ = driver_.NewStream();
        staging_ = std::make_unique<Staging>(driver_, options_.chunk_bytes);
      }
      if (session.communicator != communicator) {
        session = Session();
        session.communicator = communicator;
        session.members = communicator->size();
      }
      Cycle(session, mine);
    } catch (const std::exception& thrown) {
      const auto* typed = dynamic_cast<const Error*>(&thrown);
      const Error error = typed != nullptr ? *typed : Error(KF_INTERNAL, thrown.what());
      GiveUp(session, mine);
      for (const JobPtr& job : mine) End(job, &error, 0);
    }
    lock.lock();
  }
  const Error closed(KF_ABORTED, "the device has been closed");
  const std::vector<JobPtr> left(queue_.begin(), queue_.end());
  lock.unlock();
  for (const JobPtr& job : left) End(job, &closed, 0);
  session = Session();
  staging_.reset();
  if (stream_ != nullptr) {
    try {
      driver_.Delete(stream_);
    } catch (const Error&) {  // the device is gone, and the stream with it
    }
  }
}

void Device::End(const JobPtr& job, const Error* error, uint32_t members) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (job->ended) return;
  job->ended = true;
  job->members = members;
  if (error != nullptr) job->error = *error;
  if (error != nullptr || job->kept == nullptr) job->ready = Mark();
  const auto found = std::find(queue_.begin(), queue_.end(), job);
  if (found != queue_.end()) queue_.erase(found);
  ended_.notify_all();
}

void Device::Cycle(Session& session, const std::vector<JobPtr>& mine) {
  const std::vector<JobPtr> jobs = Order(session, mine);
  if (!jobs.empty()) {
    RunBatch(session, jobs);
    return;
  }
  // Somebody has not got what the others have. Look again when this rank has more, or in a moment, since another may.
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t before = queue_.size();
  queued_.wait_for(lock, std::chrono::milliseconds(1), [&] { return stopping_ || queue_.size() > before; });
}

std::vector<Device::JobPtr> Device::Order(Session& session, const std::vector<JobPtr>& mine) {
  const auto now = std::chrono::steady_clock::now();
  Announcement own{};
  own.present = kPresent;
  own.count = static_cast<uint32_t>(mine.size());
  for (size_t i = 0; i < mine.size(); i++) {
    const Job& job = *mine[i];
    own.ready[i] = {job.key, job.signature, job.sequence, WeightOf(job.operation), now - job.since > options_.timeout};
  }
  const auto all = Gather(*session.communicator, "kungfu/device/order", own);
  session.members = CountPresent(all);
  if (session.members < all.size() && !session.by_staging) {
    session.team.reset();
    UseStaging(session, Text(all.size() - session.members, " of ", all.size(), " ranks died"));
  }

  const auto lowest =
      std::find_if(all.begin(), all.end(), [](const Announcement& each) { return each.present == kPresent; });
  std::vector<JobPtr> common;
  const auto same = [](const Ready& a, const Ready& b) { return a.key == b.key && a.sequence == b.sequence; };
  const auto job_of = [&](const Ready& ready) {
    for (const JobPtr& job : mine) {
      if (job->key == ready.key && job->sequence == ready.sequence) return job;
    }
    return JobPtr();
  };
  for (uint32_t i = 0; i < lowest->count; i++) {
    const Ready& ready = lowest->ready[i];
    bool everywhere = true;
    bool equal = true;
    bool equal_weights = true;
    for (const Announcement& each : all) {
      if (each.present != kPresent) continue;
      const Ready* end = each.ready + each.count;
      const Ready* found = std::find_if(each.ready, end, [&](const Ready& other) { return same(ready, other); });
      everywhere = everywhere && found != end;
      equal = equal && found != end && found->signature == ready.signature;
      equal_weights = equal_weights && found != end && found->weight == ready.weight;
    }
    if (!everywhere) continue;
    const JobPtr job = job_of(ready);
    if (equal) {
      // No vendor's library weights the ranks.
      job->by_staging = job->by_staging || !equal_weights;
      common.push_back(job);
    } else {
      ReportMismatch(session, *job);
    }
  }
  // Where one rank has waited for too long for another, the ranks are not at the same place in the program: nothing
  // that some of them lack goes on.
  const bool expired = std::any_of(all.begin(), all.end(), [](const Announcement& each) {
    return std::any_of(each.ready, each.ready + each.count, [](const Ready& ready) { return ready.expired != 0; });
  });
  for (size_t i = 0; expired && i < mine.size(); i++) {
    std::string missing;
    for (uint32_t r = 0; r < all.size(); r++) {
      const Ready* end = all[r].ready + all[r].count;
      if (all[r].present == kPresent &&
          std::none_of(all[r].ready, end, [&](const Ready& other) { return same(own.ready[i], other); })) {
        missing += Text(missing.empty() ? "" : ", ", "rank ", r);
      }
    }
    if (missing.empty()) continue;
    const Error late(KF_TIMEOUT, Text(NameOf(mine[i]->operation.kind), " \"", mine[i]->name, "\": ", missing,
                                      " did not bring it within ", options_.timeout.count() / 1000.0, " s"));
    End(mine[i], &late, 0);
  }
  return common;
}

void Device::ReportMismatch(Session& session, Job& job) {
  Complaint own{};
  CopyText(own.text, Describe(job.operation));
  const auto all = Gather(*session.communicator, "kungfu/device/complaint", own);
  std::string text = Text("the ranks brought different operations under \"", job.name, "\":");
  for (size_t r = 0; r < all.size(); r++) {
    if (all[r].text[0] != '\0') text += Text(r == 0 ? "" : ";", " rank ", r, ": ", all[r].text);
  }
  const Error error(KF_MISMATCH, text);
  JobPtr held;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (const JobPtr& each : queue_) {
      if (each.get() == &job) held = each;
    }
  }
  End(held, &error, 0);
}

void Device::UseStaging(Session& session, const std::string& why) {
  session.by_staging = true;
  NoteEngine("staging: " + why);
  if (options_.engine == KF_ENGINE_STAGING || session.communicator->rank() != 0) return;
  std::fprintf(stderr, "ms_kungfu: collectives between devices go through host memory: %s\n", why.c_str());
}

// Once a session: what the ranks can use. All of them learn the same and so decide the same.
void Device::Meet(Session& session) {
  Meeting own{};
  own.present = kPresent;
  own.choice = options_.engine;
  own.has_library = engine_ != nullptr;
  CopyText(own.why, why_no_engine_);
  try {
    CopyText(own.identity, Text(BootId(), " ", driver_.Identity(driver_.Here().device)));
  } catch (const Error& error) {  // said in the gather, where the others wait for this rank
    own.has_library = 0;
    CopyText(own.why, error.what());
  }
  const auto all = Gather(*session.communicator, "kungfu/device/meet", own);
  session.members = CountPresent(all);
  session.met = true;

  bool wants_vendor = false;
  bool wants_staging = false;
  std::string why;
  for (size_t r = 0; r < all.size(); r++) {
    if (all[r].present != kPresent) {
      why = Text("rank ", r, " died");
      continue;
    }
    wants_vendor = wants_vendor || all[r].choice == KF_ENGINE_VENDOR;
    wants_staging = wants_staging || all[r].choice == KF_ENGINE_STAGING;
    if (all[r].has_library == 0 && why.empty()) why = Text("rank ", r, ": ", all[r].why);
    for (size_t other = 0; other < r && why.empty(); other++) {
      if (std::strcmp(all[other].identity, all[r].identity) == 0) {
        why = Text("rank ", other, " and rank ", r, " share device ", std::strchr(all[r].identity, ' ') + 1);
      }
    }
  }
  if (wants_staging) {
    if (wants_vendor) throw Error(KF_INVALID, "one rank wants the vendor's library, another one staging");
    UseStaging(session, "as it was asked for");
  } else if (!why.empty()) {
    if (wants_vendor) throw Error(KF_DEVICE, "the vendor's library can't be used: " + why);
    UseStaging(session, why);
  }
}

void Device::BringUp(Session& session) {
  Communicator& communicator = *session.communicator;
  struct Head {
    uint32_t ok;
    char text[252];
  };
  std::vector<char> id(sizeof(Head) + engine_->IdBytes());
  if (communicator.rank() == 0) {
    Head head{1, ""};
    try {
      const std::string made = engine_->NewId();
      std::memcpy(id.data() + sizeof head, made.data(), made.size());
    } catch (const Error& error) {
      head.ok = 0;
      CopyText(head.text, error.what());
    }
    std::memcpy(id.data(), &head, sizeof head);
  }
  const kf_tensor tensor{id.data(), id.data(), id.size()};
  Operation broadcast;
  broadcast.kind = Kind::kBroadcast;
  broadcast.name = "kungfu/device/id";
  broadcast.tensors = &tensor;
  broadcast.num_tensors = 1;
  broadcast.dtype = KF_UINT8;
  communicator.Run(broadcast);
  Head head;
  std::memcpy(&head, id.data(), sizeof head);
  Error failure(KF_DEVICE, Text("rank 0: ", head.text));
  Verdict verdict = Verdict::kFailed;
  if (head.ok != 0) {
    verdict = Rounds(
        session,
        [&] {
          if (session.team == nullptr) {
            session.team = engine_->Begin(std::string(id.data() + sizeof head, engine_->IdBytes()), communicator.rank(),
                                          communicator.size());
          }
          return session.team->Ready();
        },
        &failure);
  }
  if (verdict == Verdict::kDone) {
    NoteEngine(engine_->Name());
    return;
  }
  session.team.reset();
  if (verdict == Verdict::kDied) {
    UseStaging(session, "a rank died while " + engine_->Name() + " came up");
  } else {
    const std::string why = Text(engine_->Name(), " did not come up: ", failure.what());
    if (options_.engine == KF_ENGINE_VENDOR) throw Error(KF_DEVICE, why);
    UseStaging(session, why);
  }
}

// Until all ranks are `done`, one has failed (`done` throws there) or one has died. The same verdict at all ranks.
Device::Verdict Device::Rounds(Session& session, const std::function<bool()>& done, Error* failure) {
  const auto begin = std::chrono::steady_clock::now();
  Status own{};
  own.present = kPresent;
  own.state = kRunning;
  for (;;) {
    try {
      const auto round_end = std::chrono::steady_clock::now() + kRound;
      if (own.state == kRunning) {
        bool finished = false;
        Poll([&] {
          finished = done();
          return finished || std::chrono::steady_clock::now() > round_end;
        });
        if (finished) {
          own.state = kDone;
        } else if (std::chrono::steady_clock::now() - begin > options_.timeout) {
          throw Error(KF_TIMEOUT, Text("not finished within ", options_.timeout.count() / 1000.0, " s"));
        }
      }
    } catch (const Error& error) {
      own.state = kFailed;
      CopyText(own.text, error.what());
    }
    const auto all = Gather(*session.communicator, "kungfu/device/rounds", own);
    const uint32_t members = CountPresent(all);
    bool all_done = true;
    for (size_t r = 0; r < all.size(); r++) {
      if (all[r].present != kPresent) continue;
      all_done = all_done && all[r].state == kDone;
    }
    // A rank that died after all survivors had finished takes nothing away from the result.
    const bool died = members < session.members;
    if (all_done) return Verdict::kDone;
    if (died) {
      session.members = members;
      return Verdict::kDied;
    }
    for (size_t r = 0; r < all.size(); r++) {
      if (all[r].present != kPresent || all[r].state != kFailed) continue;
      *failure = Error(KF_DEVICE, Text("rank ", r, ": ", all[r].text));
      return Verdict::kFailed;
    }
  }
}

void Device::RunBatch(Session& session, const std::vector<JobPtr>& jobs) {
  std::vector<JobPtr> by_engine, by_staging;
  for (const JobPtr& job : jobs) {
    try {
      SaveInputs(job);
    } catch (const Error& error) {  // said in the rounds, where the others wait for this rank
      job->failure = error;
    }
    const bool fits = engine_ != nullptr && engine_->Supports(job->operation);
    (fits && !job->by_staging ? by_engine : by_staging).push_back(job);
  }
  if (!by_engine.empty() && !session.by_staging) {
    if (!session.met) Meet(session);
    if (!session.by_staging && session.team == nullptr) BringUp(session);
  }
  if (session.by_staging || !RunByEngine(session, by_engine)) by_staging = jobs;
  RunByStaging(session, by_staging);
}

// A reduction in place overwrites what it would have to begin with if a rank dies in it.
void Device::SaveInputs(const JobPtr& job) {
  if (job->kept != nullptr || !Reduces(job->operation)) return;
  const size_t unit = SizeOf(job->operation.dtype);
  size_t bytes = 0;
  for (const kf_tensor& tensor : job->tensors) {
    if (tensor.input == tensor.output) bytes += AlignedForDevice(tensor.count * unit);
  }
  if (bytes == 0) return;
  job->kept = std::make_unique<Block>(driver_, /*host=*/false);
  char* at = job->kept->Get(bytes);
  job->ready.Precede(stream_);
  for (kf_tensor& tensor : job->tensors) {
    if (tensor.input != tensor.output || tensor.count == 0) continue;
    driver_.Copy(at, tensor.input, tensor.count * unit, KF_DEVICE_TO_DEVICE, stream_);
    tensor.input = at;
    at += AlignedForDevice(tensor.count * unit);
  }
  job->ready = Mark(driver_, stream_);
}

// Whether they have ended; if not, a rank died and they are to be done again.
bool Device::RunByEngine(Session& session, const std::vector<JobPtr>& jobs) {
  if (jobs.empty()) return true;
  size_t launched = 0;
  std::optional<Mark> last;
  Error failure(KF_OK, "");
  const Verdict verdict = Rounds(
      session,
      [&] {
        if (!last.has_value()) {
          if (!session.team->Ready()) return false;
          if (launched < jobs.size()) {
            const Job& job = *jobs[launched++];
            if (job.failure) throw *job.failure;
            job.ready.Precede(stream_);
            session.team->Launch(job.operation, stream_);
            return false;
          }
          last.emplace(driver_, stream_);
        }
        session.team->CheckHealth();
        return last->Done();
      },
      &failure);
  switch (verdict) {
    case Verdict::kDone:
      for (const JobPtr& job : jobs) End(job, nullptr, session.members);
      return true;
    case Verdict::kDied:
      GiveUp(session, jobs);
      UseStaging(session, "a rank died in an operation of " + engine_->Name());
      return false;
    case Verdict::kFailed:
      GiveUp(session, jobs);
      for (const JobPtr& job : jobs) {
        const Error error(KF_DEVICE, Text(NameOf(job->operation.kind), " \"", job->name, "\": ", failure.what()));
        End(job, &error, 0);
      }
      return true;
  }
  return true;
}

// Ends what the team has begun, so that nothing writes into the tensors any more.
void Device::GiveUp(Session& session, const std::vector<JobPtr>& jobs) {
  if (session.team == nullptr || stream_ == nullptr) return;
  session.team.reset();
  driver_.Abort(stream_);
  bool drained = false;
  try {
    const Mark last(driver_, stream_);
    const auto deadline = std::chrono::steady_clock::now() + kDrain;
    Poll([&] {
      drained = last.Done();
      return drained || std::chrono::steady_clock::now() > deadline;
    });
  } catch (const Error&) {  // a device that fails doesn't write any more
    drained = true;
  }
  if (drained) return;
  // Left as it is: deleting it would wait for it.
  try {
    stream_ = driver_.NewStream();
  } catch (const Error&) {
    stream_ = nullptr;
  }
  const Error stuck(KF_DEVICE, Text("what was given up has not ended within ", kDrain.count(),
                                    " s, and may still write: this process should end"));
  for (const JobPtr& job : jobs) End(job, &stuck, 0);
}

// In the order given, until all of them have ended with the same ranks.
void Device::RunByStaging(Session& session, const std::vector<JobPtr>& jobs) {
  if (jobs.empty()) return;
  std::string failure;
  for (;;) {
    Status own{};
    own.present = kPresent;
    for (const JobPtr& job : jobs) {
      staging_->Run(*session.communicator, job->operation, job->ready, &job->failure);
      if (!job->failure || own.state == kFailed) continue;
      own.state = kFailed;
      CopyText(own.text, Text(NameOf(job->operation.kind), " \"", job->name, "\": ", job->failure->what()));
    }
    const auto all = Gather(*session.communicator, "kungfu/device/rounds", own);
    const uint32_t before = session.members;
    session.members = CountPresent(all);
    for (size_t r = 0; r < all.size() && failure.empty(); r++) {
      if (all[r].state == kFailed) failure = Text("rank ", r, ": ", all[r].text);
    }
    if (session.members == before || !failure.empty()) break;
  }
  const Error error(KF_DEVICE, failure);
  for (const JobPtr& job : jobs) End(job, failure.empty() ? nullptr : &error, session.members);
}

}  // namespace kungfu::device
