#include "device/session.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "collectives/dtype.h"
#include "collectives/gather.h"

namespace kungfu::device {
namespace {

constexpr auto kRound = std::chrono::milliseconds(10);
constexpr auto kDrain = std::chrono::seconds(10);

// ---- what each rank contributes to a gather

struct Ready {
  uint64_t key;        // hash of the name
  uint64_t signature;  // hash of the properties that must be equal on all ranks
  uint32_t sequence;   // number of this operation among the operations with its name
  uint32_t weight;     // the rank's weight in a mean; 0 if all ranks have equal weights
  uint32_t expired;    // 1 if the rank has waited too long for this operation
};
struct Announcement {
  uint32_t count;
  Ready ready[Session::kMostReady];
};
// Returns the entry in `announcement` that describes the same operation as `ready`, or null if
// there is none.
const Ready* Find(const Announcement& announcement, const Ready& ready) {
  const Ready* const end = announcement.ready + announcement.count;
  const Ready* const found = std::find_if(announcement.ready, end, [&](const Ready& each) {
    return each.key == ready.key && each.sequence == ready.sequence;
  });
  return found == end ? nullptr : found;
}
struct Capabilities {
  uint32_t choice;       // kf_engine
  uint32_t has_library;  // 1 if the engine's library is available
  char identity[100];    // identity of the host and its device
  char why[148];         // why the library isn't available
};
struct Status {
  uint32_t state;
  char text[184];
};
enum State : uint32_t { kRunning = 1, kDone = 2, kFailed = 3 };
struct Complaint {
  char text[256];
};

uint32_t WeightOf(const Operation& operation) {
  const bool counts = operation.weighting.applies && operation.op == KF_MEAN && IsFloat(operation.dtype);
  return counts ? operation.weighting.own : 0;
}

std::string BootId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace

Session::Session(SessionTools& tools, std::shared_ptr<Communicator> communicator)
    : tools_(tools), communicator_(std::move(communicator)), members_(communicator_->size()) {}

bool Session::RunCycle(const std::vector<JobPtr>& mine) {
  const std::vector<JobPtr> jobs = Order(mine);
  if (jobs.empty()) return false;
  RunBatch(jobs);
  return true;
}

std::vector<JobPtr> Session::Order(const std::vector<JobPtr>& mine) {
  const auto now = RunTime::Clock::now();
  Announcement own{};
  own.count = static_cast<uint32_t>(mine.size());
  for (size_t i = 0; i < mine.size(); i++) {
    Job& job = *mine[i];
    own.ready[i] = {job.key, job.signature, job.sequence, WeightOf(job.operation),
                    job.waited.Look(now) > tools_.options.timeout};
  }
  const auto all = GatherLiving(*communicator_, "kungfu/device/order", own);
  members_ = all.members.size();
  if (members_ < all.rows.size() && !by_staging_) {
    vendors_.reset();
    UseStaging(Text(all.rows.size() - members_, " of ", all.rows.size(), " ranks failed"));
  }

  std::vector<JobPtr> common;
  for (uint32_t i = 0; i < all.first().count; i++) {
    const Ready& ready = all.first().ready[i];
    bool everywhere = true;
    bool equal = true;
    bool equal_weights = true;
    for (const uint32_t r : all.members) {
      const Ready* theirs = Find(all.rows[r], ready);
      everywhere = everywhere && theirs != nullptr;
      equal = equal && theirs != nullptr && theirs->signature == ready.signature;
      equal_weights = equal_weights && theirs != nullptr && theirs->weight == ready.weight;
    }
    if (!everywhere) continue;
    const JobPtr& job = mine[Find(own, ready) - own.ready];
    if (equal) {
      // The vendors' libraries can't compute a weighted average over the ranks.
      job->by_staging = job->by_staging || !equal_weights;
      common.push_back(job);
    } else {
      ReportMismatch(job);
    }
  }
  // If a rank has waited too long for another rank, the ranks aren't at the same place in the
  // program. So every operation that isn't called on all ranks fails.
  const bool expired = std::any_of(all.rows.begin(), all.rows.end(), [](const Announcement& each) {
    return std::any_of(each.ready, each.ready + each.count, [](const Ready& ready) { return ready.expired != 0; });
  });
  for (size_t i = 0; expired && i < mine.size(); i++) {
    std::string missing;
    for (const uint32_t r : all.members) {
      if (Find(all.rows[r], own.ready[i]) == nullptr) missing += Text(missing.empty() ? "" : ", ", "rank ", r);
    }
    if (missing.empty()) continue;
    const Error late(KF_TIMEOUT, Text(NameOf(mine[i]->operation.kind), " \"", mine[i]->name, "\": ", missing,
                                      " did not call it within ", tools_.options.timeout.count() / 1000.0, " s"));
    tools_.end(mine[i], &late, 0);
  }
  return common;
}

void Session::ReportMismatch(const JobPtr& job) {
  Complaint own{};
  CopyText(own.text, Describe(job->operation));
  const auto all = GatherLiving(*communicator_, "kungfu/device/complaint", own);
  std::vector<std::pair<std::string, std::string>> brought;
  for (const uint32_t r : all.members) brought.emplace_back(Text("rank ", r), all.rows[r].text);
  const Error error(KF_MISMATCH, MismatchText("ranks", job->name, brought));
  tools_.end(job, &error, 0);
}

void Session::UseStaging(const std::string& why) {
  by_staging_ = true;
  tools_.note_engine("staging: " + why);
  if (tools_.options.engine == KF_ENGINE_STAGING || communicator_->rank() != 0) return;
  std::fprintf(stderr, "ms_kungfu: collectives between devices go through host memory: %s\n", why.c_str());
}

// Chooses between the engine and staging, once per session. All ranks gather the same capabilities,
// so they make the same choice.
void Session::ChooseEngine() {
  Capabilities own{};
  own.choice = tools_.options.engine;
  own.has_library = tools_.engine != nullptr;
  CopyText(own.why, tools_.why_no_engine);
  try {
    CopyText(own.identity, Text(BootId(), " ", tools_.driver.Identity(tools_.driver.Here().device)));
  } catch (const Error& error) {  // the next gather, in which the other ranks wait, reports the error
    own.has_library = 0;
    CopyText(own.why, error.what());
  }
  const auto all = GatherLiving(*communicator_, "kungfu/device/capabilities", own);
  members_ = all.members.size();
  engine_chosen_ = true;

  bool wants_vendor = false;
  bool wants_staging = false;
  std::string why = members_ < all.rows.size() ? "a rank failed" : "";
  for (const uint32_t r : all.members) {
    const Capabilities& its = all.rows[r];
    wants_vendor = wants_vendor || its.choice == KF_ENGINE_VENDOR;
    wants_staging = wants_staging || its.choice == KF_ENGINE_STAGING;
    if (its.has_library == 0 && why.empty()) why = Text("rank ", r, ": ", its.why);
    for (const uint32_t other : all.members) {
      if (other < r && why.empty() && std::strcmp(all.rows[other].identity, its.identity) == 0) {
        why = Text("rank ", other, " and rank ", r, " share device ", std::strchr(its.identity, ' ') + 1);
      }
    }
  }
  if (wants_staging) {
    if (wants_vendor)
      throw Error(KF_INVALID,
                  "the ranks' device engines differ: some require \"vendor\", others \"staging\"; set the same one on "
                  "all ranks");
    UseStaging("as requested");
  } else if (!why.empty()) {
    if (wants_vendor) throw Error(KF_DEVICE, "the vendor's library can't be used: " + why);
    UseStaging(why);
  }
}

void Session::BringUp() {
  Communicator& communicator = *communicator_;
  struct Head {
    uint32_t ok;
    char text[252];
  };
  std::vector<char> id(sizeof(Head) + tools_.engine->IdBytes());
  if (communicator.rank() == 0) {
    Head head{1, ""};
    try {
      const std::string made = tools_.engine->NewId();
      std::memcpy(id.data() + sizeof head, made.data(), made.size());
    } catch (const Error& error) {
      head.ok = 0;
      CopyText(head.text, error.what());
    }
    std::memcpy(id.data(), &head, sizeof head);
  }
  const kf_tensor tensor{id.data(), id.data(), id.size()};
  communicator.Run({Kind::kBroadcast, "kungfu/device/id", &tensor, 1});
  Head head;
  std::memcpy(&head, id.data(), sizeof head);
  Error failure(KF_DEVICE, Text("rank 0: ", head.text));
  Outcome outcome = Outcome::kFailed;
  if (head.ok != 0) {
    outcome = Rounds(
        [&] {
          if (vendors_ == nullptr) {
            vendors_ = tools_.engine->Begin(std::string(id.data() + sizeof head, tools_.engine->IdBytes()),
                                            communicator.rank(), communicator.size());
          }
          return vendors_->Ready();
        },
        &failure);
  }
  if (outcome == Outcome::kDone) {
    tools_.note_engine(tools_.engine->Name());
    return;
  }
  vendors_.reset();
  if (outcome == Outcome::kPeerFailed) {
    UseStaging("a rank failed while " + tools_.engine->Name() + " was starting");
  } else {
    const std::string why = Text(tools_.engine->Name(), " did not start: ", failure.what());
    if (tools_.options.engine == KF_ENGINE_VENDOR) throw Error(KF_DEVICE, why);
    UseStaging(why);
  }
}

// Gathers the ranks' states repeatedly until all ranks are `done`, a rank has an error (`done`
// throws on that rank), or a rank has failed. The outcome is the same on all ranks.
Session::Outcome Session::Rounds(const std::function<bool()>& done, Error* failure) {
  RunTime waited;
  Status own{};
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
        } else if (waited.Look() > tools_.options.timeout) {
          throw Error(KF_TIMEOUT, Text("not finished within ", tools_.options.timeout.count() / 1000.0, " s"));
        }
      }
    } catch (const Error& error) {
      own.state = kFailed;
      CopyText(own.text, error.what());
    }
    const auto all = GatherLiving(*communicator_, "kungfu/device/rounds", own);
    const bool all_done =
        std::all_of(all.members.begin(), all.members.end(), [&](uint32_t r) { return all.rows[r].state == kDone; });
    // If all ranks were done, the result is valid even if a rank has failed since.
    if (all_done) return Outcome::kDone;
    if (all.members.size() < members_) {
      members_ = all.members.size();
      return Outcome::kPeerFailed;
    }
    for (const uint32_t r : all.members) {
      if (all.rows[r].state != kFailed) continue;
      *failure = Error(KF_DEVICE, Text("rank ", r, ": ", all.rows[r].text));
      return Outcome::kFailed;
    }
  }
}

void Session::RunBatch(const std::vector<JobPtr>& jobs) {
  std::vector<JobPtr> by_engine, by_staging;
  for (const JobPtr& job : jobs) {
    try {
      SaveInputs(job);
    } catch (const Error& error) {  // the rounds, in which the other ranks wait, report the error
      job->failure = error;
    }
    const bool fits = tools_.engine != nullptr && tools_.engine->Supports(job->operation);
    (fits && !job->by_staging ? by_engine : by_staging).push_back(job);
  }
  if (!by_engine.empty() && !by_staging_) {
    if (!engine_chosen_) ChooseEngine();
    if (!by_staging_ && vendors_ == nullptr) BringUp();
  }
  if (by_staging_ || !RunByEngine(by_engine)) by_staging = jobs;
  RunByStaging(by_staging);
}

// Copies the inputs of an in-place reduction. If a rank fails during the reduction, the reduction
// must be repeated with the old inputs.
void Session::SaveInputs(const JobPtr& job) {
  if (job->kept != nullptr || !Reduces(job->operation.kind)) return;
  const size_t unit = SizeOf(job->operation.dtype);
  size_t bytes = 0;
  for (const kf_tensor& tensor : job->tensors) {
    if (tensor.input == tensor.output) bytes += AlignedForDevice(tensor.count * unit);
  }
  if (bytes == 0) return;
  job->kept = std::make_unique<Block>(tools_.driver, /*host=*/false);
  char* at = job->kept->Get(bytes);
  job->ready.Precede(tools_.stream);
  for (kf_tensor& tensor : job->tensors) {
    if (tensor.input != tensor.output || tensor.count == 0) continue;
    tools_.driver.Copy(at, tensor.input, tensor.count * unit, KF_DEVICE_TO_DEVICE, tools_.stream);
    tensor.input = at;
    at += AlignedForDevice(tensor.count * unit);
  }
  job->ready = Mark(tools_.driver, tools_.stream);
}

// Returns true if the operations have ended, and false if they must be repeated because a rank
// failed.
bool Session::RunByEngine(const std::vector<JobPtr>& jobs) {
  if (jobs.empty()) return true;
  size_t launched = 0;
  std::optional<Mark> last;
  Error failure(KF_OK, "");
  const Outcome outcome = Rounds(
      [&] {
        if (!last.has_value()) {
          if (!vendors_->Ready()) return false;
          if (launched < jobs.size()) {
            const Job& job = *jobs[launched++];
            if (job.failure) throw *job.failure;
            job.ready.Precede(tools_.stream);
            vendors_->Launch(job.operation, tools_.stream);
            return false;
          }
          last.emplace(tools_.driver, tools_.stream);
        }
        vendors_->CheckHealth();
        return last->Done();
      },
      &failure);
  switch (outcome) {
    case Outcome::kDone:
      for (const JobPtr& job : jobs) tools_.end(job, nullptr, members_);
      return true;
    case Outcome::kPeerFailed:
      GiveUp(jobs);
      UseStaging("a rank failed in an operation of " + tools_.engine->Name());
      return false;
    case Outcome::kFailed:
      GiveUp(jobs);
      for (const JobPtr& job : jobs) {
        const Error error(KF_DEVICE, Text(NameOf(job->operation.kind), " \"", job->name, "\": ", failure.what()));
        tools_.end(job, &error, 0);
      }
      return true;
  }
  return true;
}

void Session::GiveUp(const std::vector<JobPtr>& jobs) {
  if (vendors_ == nullptr || tools_.stream == nullptr) return;
  vendors_.reset();
  tools_.driver.Abort(tools_.stream);
  bool drained = false;
  try {
    const Mark last(tools_.driver, tools_.stream);
    RunTime waited;
    Poll([&] {
      drained = last.Done();
      return drained || waited.Look() > kDrain;
    });
  } catch (const Error&) {  // a failed device doesn't write any more
    drained = true;
  }
  if (drained) return;
  // Don't delete the old stream, because deleting it would wait for its work.
  try {
    tools_.stream = tools_.driver.NewStream();
  } catch (const Error&) {
    tools_.stream = nullptr;
  }
  const Error stuck(KF_DEVICE, Text("an aborted operation is still running after ", kDrain.count(),
                                    " s and may still write to its tensors; end this process"));
  for (const JobPtr& job : jobs) tools_.end(job, &stuck, 0);
}

// Runs the operations in the given order. Repeats them until all have ended with the same ranks.
void Session::RunByStaging(const std::vector<JobPtr>& jobs) {
  if (jobs.empty()) return;
  std::string failure;
  for (;;) {
    Status own{};
    for (const JobPtr& job : jobs) {
      tools_.staging->Run(*communicator_, job->operation, job->ready, &job->failure);
      if (!job->failure || own.state == kFailed) continue;
      own.state = kFailed;
      CopyText(own.text, Text(NameOf(job->operation.kind), " \"", job->name, "\": ", job->failure->what()));
    }
    const auto all = GatherLiving(*communicator_, "kungfu/device/rounds", own);
    const size_t before = std::exchange(members_, all.members.size());
    for (const uint32_t r : all.members) {
      if (all.rows[r].state == kFailed && failure.empty()) failure = Text("rank ", r, ": ", all.rows[r].text);
    }
    if (members_ == before || !failure.empty()) break;
  }
  const Error error(KF_DEVICE, failure);
  for (const JobPtr& job : jobs) tools_.end(job, failure.empty() ? nullptr : &error, members_);
}

}  // namespace kungfu::device
