#include "collectives/hosts/cluster_communicator.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "base/interrupt.h"
#include "base/memory.h"
#include "base/run_time.h"
#include "collectives/dtype.h"
#include "collectives/gather.h"
#include "collectives/host/transfer.h"
#include "collectives/hosts/slices.h"
#include "collectives/kept_inputs.h"
#include "collectives/observer.h"
#include "collectives/operation_span.h"

namespace kungfu {
namespace {

using hosts::Commit;

// The time that a rank waits for an answer from the transport, which runs in the host's launcher.
// The transport answers immediately, unless the launcher is stopped.
constexpr auto kAnswerLimit = std::chrono::seconds(1);
constexpr size_t kMostOfName = hosts::Request::kMostBytes / 2;

// Returns true if the operation is a slice of a larger operation. Other slices then run at the same
// time and keep the host's cores and network busy.
bool IsSlice(const Operation& operation) { return operation.part.of != nullptr; }

size_t BytesWithCommitOf(const Operation& operation) {
  if (operation.planes != nullptr) return 0;
  return hosts::BytesWithCommit(operation.kind, operation.dtype, operation.op, CountOf(operation));
}

// Returns the operation by which a rank receives the transport's commit or result in `tensors`.
Operation FromTransport(const Operation& operation, Stage stage, const kf_tensor* tensors, size_t num_tensors,
                        kf_dtype dtype, uint32_t transport) {
  Operation part{Kind::kBroadcast, operation.name, tensors, num_tensors, dtype, KF_SUM, transport};
  part.part = {&operation, stage, operation.part.track, SignatureOf(operation), /*patient=*/IsSlice(operation)};
  return part;
}

CommunicatorOptions Asking(CommunicatorOptions options,
                           std::function<std::string(const Operation&)> behind_the_transport) {
  options.behind_it = std::move(behind_the_transport);
  return options;
}

// Returns the planes that a host's ranks contribute to their transport. `own` still points to the
// caller's memory.
Planes LocalPlanes(const Planes& planes, const hosts::Places& places, uint32_t host) {
  Planes local;
  local.most = 1;
  for (const uint32_t rank : places.RanksOn(host)) {
    local.of_rank.push_back(planes.of_rank[rank]);
    local.most = std::max(local.most, planes.of_rank[rank]);
  }
  local.of_rank.push_back(0);  // the transport contributes no planes
  local.own = planes.own;
  return local;
}

std::optional<uint32_t> SourceOn(const hosts::Places& places, uint32_t host, const Operation& broadcast) {
  static const Members kNone;
  return places.SourceOn(host, broadcast.root, broadcast.sources == nullptr ? kNone : *broadcast.sources);
}

// Returns the operation by which a rank sends its contribution to its transport.
Operation ToHostOf(const Operation& operation, const hosts::Places& places, uint32_t host) {
  Operation to_host = operation;
  to_host.part.of = &operation;
  to_host.part.patient = IsSlice(operation);
  to_host.part.signature = SignatureOf(operation);
  to_host.layout = nullptr;
  to_host.part.pins_buffer =
      operation.planes == nullptr && hosts::PinsBuffer(operation.kind, operation.dtype, operation.op);
  to_host.sized_for_ranks = 0;
  to_host.root = places.TransportOf(host);
  switch (operation.kind) {
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
      // A mean of integers is computed from all contributions at once, in a wider type.
      to_host.kind = hosts::GoesInRows(operation) ? Kind::kGatherTo : Kind::kReduceTo;
      break;
    case Kind::kAllGather:
      to_host.kind = Kind::kGatherTo;
      break;
    case Kind::kBroadcast:
      if (const auto source = SourceOn(places, host, operation)) {
        to_host.root = places.LocalOf(*source);
        break;
      }
      [[fallthrough]];
    default:
      to_host.kind = Kind::kBarrier;
      to_host.tensors = nullptr;
      to_host.num_tensors = 0;
      break;
  }
  return to_host;
}

}  // namespace

// A rank's contribution to an operation that adds up planes (collectives/planes.h). In() returns
// the contribution again after a failure, because the planes depend on which ranks contribute.
class ClusterCommunicator::Renewal final : public Communicator::Renewable {
 public:
  using OperationIn = std::function<const Operation*(uint32_t generation)>;

  Renewal(ClusterCommunicator& cluster, Name& name, uint32_t generation, OperationIn operation_in)
      : cluster_(cluster), name_(name), generation_(generation), operation_in_(std::move(operation_in)) {}

  const Operation* In(uint32_t local_generation) override {
    generation_ = std::max(generation_, cluster_.AwaitGenerationWithout(local_generation));
    operation = operation_in_(generation_);
    if (operation == nullptr) return nullptr;
    if (!name_.told || *name_.told < generation_) {
      cluster_.Tell(*operation, generation_, /*renewal=*/true);
      name_.told = generation_;
    }
    planes_ = LocalPlanes(*operation->planes, cluster_.places_, cluster_.host_);
    to_host_ = ToHostOf(*operation, cluster_.places_, cluster_.host_);
    to_host_.planes = &planes_;
    to_host_.kind = Kind::kGatherTo;
    return &to_host_;
  }
  uint32_t generation() const { return generation_; }

  const Operation* operation = nullptr;

 private:
  ClusterCommunicator& cluster_;
  Name& name_;
  uint32_t generation_;
  const OperationIn operation_in_;
  Planes planes_;
  Operation to_host_;
};

ClusterCommunicator::ClusterCommunicator(const std::shared_ptr<shm::Segment>& local,
                                         const std::shared_ptr<shm::Segment>& control_segment, int requests,
                                         const hosts::Places& places, uint32_t rank, const std::string& address,
                                         bool has_state, const CommunicatorOptions& options)
    : Communicator(rank, control_segment->size(), control_segment->cluster_version()),
      places_(places),
      host_(rank < places.ranks() ? places.HostOf(rank) : 0),
      transport_(places.TransportOf(host_)),
      slice_bytes_(options.slice_bytes),
      control_(control_segment, local, places, host_),
      local_(local, rank < places.ranks() ? places.LocalOf(rank) : transport_, address, has_state,
             Asking(
                 options, [this](const Operation& part) { return BehindTheTransport(part); }),
             places.RanksOn(host_)),
      local_control_(local) {
  if (rank >= size_ || places.ranks() != size_ || local->size() != transport_ + 1) {
    throw Error(KF_INVALID, Text("rank ", rank, " of ", size_, ": its host's segment has ", local->size(),
                                 " members, which does not match the places of ", places.ranks(), " ranks"));
  }
  requests_ = fcntl(requests, F_DUPFD_CLOEXEC, 0);
  if (requests_ < 0) throw SystemError("the socket to this host's transport");
}

ClusterCommunicator::~ClusterCommunicator() { close(requests_); }

void ClusterCommunicator::Assemble() {
  process_.Refuse("join");
  local_.Assemble();
  const bool has_state = local_control_.HasState(places_.LocalOf(rank_));
  const auto all = GatherLiving(*this, "kungfu/join", static_cast<uint8_t>(has_state ? 1 : 0));
  control_.SetStates({all.rows.begin(), all.rows.end()});
}

void ClusterCommunicator::Close(kf_status status, const std::string& reason) {
  Communicator::Close(status, reason);
  local_.Close(status, reason);
}

void ClusterCommunicator::GiveUp(const Error& error) {
  local_.GiveUp(error);
  Communicator::Close(error.status(), error.what());
}

// Runs `body`, and calls GiveUp if `body` throws. If the error comes from the host's communicator,
// that communicator has already called GiveUp, and ignores another call.
template <typename Body>
void ClusterCommunicator::OrGiveUp(const Body& body) {
  closure_.ThrowIfClosed();
  try {
    body();
  } catch (const host::FailedEverywhere&) {
    throw;
  } catch (const Closed& error) {
    Communicator::Close(error.status(), error.what());
    throw;
  } catch (const host::Expelled& error) {
    Close(error.status(), error.what());
    throw;
  } catch (const Error& error) {
    GiveUp(error);
    throw;
  } catch (const std::exception& error) {
    GiveUp(Error(KF_INTERNAL, error.what()));
    throw;
  }
}

// ---- operations

void ClusterCommunicator::SetSources(Members sources) {
  if (!sources.empty() && sources.back() >= size_) {
    throw Error(KF_INVALID, Text("source rank ", sources.back(), " is not a rank of a cluster of ", size_));
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  sources_ = sources.empty() ? nullptr : std::make_shared<const Members>(std::move(sources));
}

uint32_t ClusterCommunicator::Run(const Operation& asked) {
  process_.Refuse("take part in collectives");
  closure_.ThrowIfClosed();
  Operation operation = asked;
  std::shared_ptr<const Members> sources;
  if (operation.kind == Kind::kBroadcast) {
    const std::lock_guard<std::mutex> guard(mutex_);
    sources = sources_;
    if (sources && std::binary_search(sources->begin(), sources->end(), operation.root))
      operation.sources = sources.get();
  }
  Check(operation);
  const auto observed = Observer::Observe(operation);
  uint32_t generation = 0;
  // The outputs are written only after the operation has ended for all ranks, so the inputs needn't
  // be copied.
  OrGiveUp([&] { generation = RunShared(operation, 0); });
  reductions_.Note(operation, generation);
  if (observed) observed->Done(size_);
  return generation;
}

uint32_t ClusterCommunicator::RunAll(const Operation* operations, size_t num_operations) {
  process_.Refuse("take part in collectives");
  closure_.ThrowIfClosed();
  for (size_t k = 0; k < num_operations; k++) Check(operations[k]);
  const ObservedTogether observed(operations, num_operations);
  uint32_t generation = 0;
  OrGiveUp([&] {
    generation = RunAndSettle(RunsShared(), recovers() && num_operations > 1, operations, num_operations);
    if (num_operations > 0) reductions_.NoteSettled(operations[0], generation);
  });
  observed.Done(size_);
  return generation;
}

uint32_t ClusterCommunicator::Settle(const Operation* operations, uint32_t* generations, size_t num_operations) {
  uint32_t latest = 0;
  OrGiveUp([&] {
    latest = SettleBy(RunsShared(), operations, generations, num_operations);
    if (num_operations > 0) reductions_.NoteSettled(operations[0], latest);
  });
  return latest;
}

RunFromGeneration ClusterCommunicator::RunsShared() {
  return [this](const Operation& operation, uint32_t from) { return RunShared(operation, from); };
}

std::optional<uint32_t> ClusterCommunicator::RunRenewable(Renewable& operation, uint32_t from_generation) {
  process_.Refuse("take part in collectives");
  std::optional<uint32_t> generation;
  OrGiveUp([&] {
    generation = RunGenerations(from_generation, [&](uint32_t now) {
      const Operation* const renewed = operation.In(now);
      if (renewed != nullptr) Check(*renewed);
      return renewed;
    });
  });
  return generation;
}

// Reserves a name for one operation while this object lives.
class ClusterCommunicator::Turn {
 public:
  Turn(ClusterCommunicator& cluster, const char* name)
      : cluster_(cluster), text_(name), name_(cluster.Find(text_)), busy_(name_->busy) {}
  ~Turn() { cluster_.Forget(text_); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  ClusterCommunicator& cluster_;
  const std::string text_;
  const std::shared_ptr<Name> name_;
  const std::unique_lock<std::mutex> busy_;
};

uint32_t ClusterCommunicator::RunShared(const Operation& operation, uint32_t from_generation) {
  closure_.ThrowIfClosed();
  if (operation.planes != nullptr) return *RunGenerations(from_generation, [&](uint32_t) { return &operation; });
  const OperationSpan span(cluster_version_);
  span.Began(operation);
  const Turn turn(*this, operation.name);
  uint32_t generation = 0;
  if (hosts::Slices::Cuts(operation, slice_bytes_)) {
    generation = RunInSlices(operation, from_generation);
  } else {
    Brought brought = Bring(operation, from_generation);
    generation = *Hear(operation, brought);
  }
  span.Ended(operation);
  return generation;
}

// Runs an operation in slices (see slices.h).
uint32_t ClusterCommunicator::RunInSlices(const Operation& operation, uint32_t from_generation) {
  std::optional<KeptInputs> kept;
  const bool keeps = recovers() && InPlace(operation);
  const hosts::Slices slices(keeps ? *kept.emplace(&operation, 1).operations() : operation, slice_bytes_);
  std::vector<uint32_t> generations(slices.size()), open(slices.size());
  std::iota(open.begin(), open.end(), 0u);
  std::vector<Brought> on(hosts::kTracks);  // for each track, the contribution to its latest slice
  uint32_t latest = from_generation;
  for (bool is_first = true; !open.empty(); is_first = false) {
    const auto at = [&](size_t place) { return slices.At(open[place], static_cast<uint8_t>(place % hosts::kTracks)); };
    for (size_t brought = 0, over = 0; over < open.size(); over++) {
      for (; brought < std::min<size_t>(open.size(), over + hosts::kTracks); brought++) {
        const bool leads = is_first && brought == 0;
        Brought& track = on[brought % hosts::kTracks];
        track = Bring(at(brought), latest, /*more_follow=*/leads);
        if (leads) KUNGFU_CHECK(!Hear(at(brought), track), "\"", operation.name, "\" has ended after its first slice");
      }
      generations[open[over]] = *Hear(at(over), on[over % hosts::kTracks]);
      KUNGFU_FAULT_POINT("between two slices");
    }
    latest = *std::max_element(generations.begin(), generations.end());
    open.clear();
    for (uint32_t k = 0; k < slices.size(); k++) {
      if (generations[k] < latest) open.push_back(k);
    }
  }
  return latest;
}

ClusterCommunicator::Brought ClusterCommunicator::Bring(const Operation& operation, uint32_t generation,
                                                        bool more_follow) {
  KUNGFU_FAULT_POINT("before it tells its transport");
  Tell(operation, generation, /*renewal=*/false, more_follow);
  KUNGFU_FAULT_POINT("when it has told its transport");
  Brought brought = local_.RunPinned(ToHostOf(operation, places_, host_), AwaitLocalFailures(generation));
  KUNGFU_FAULT_POINT("when its transport has its contribution");
  return brought;
}

// Waits for the outcome of this rank's contribution, and receives the result. Returns the
// generation in which the operation ended, or none if the rank must first contribute more slices.
std::optional<uint32_t> ClusterCommunicator::Hear(const Operation& operation, Brought& brought) {
  for (;;) {
    const hosts::CommitAndResult word = HearCommit(operation);
    const Commit& commit = word.commit;
    KUNGFU_FAULT_POINT("when it has heard the commit");
    switch (commit.what) {
      case Commit::kFailed:
        brought.LetGo();
        Fail(operation, commit);
      case Commit::kDone:
        if (commit.in_pinned_buffer != 0) {
          KUNGFU_CHECK(brought.HasBuffer(), "\"", operation.name,
                       "\": its result is in a staging buffer that is not pinned");
          local_.Read(brought, transport_, operation);
        } else if (BytesWithCommitOf(operation) > 0) {
          host::CopyToTensors(operation, word.result);
        } else {
          TakeResult(operation);
        }
        brought.LetGo();
        KUNGFU_FAULT_POINT("when it has the result");
        return commit.generation;
      case Commit::kMore:
        return std::nullopt;
      default:
        KUNGFU_FAULT_POINT("before it contributes again");
        brought.LetGo();
        brought = local_.RunPinned(ToHostOf(operation, places_, host_), AwaitLocalFailures(commit.generation));
    }
  }
}

// Runs an operation that adds up planes (collectives/planes.h).
template <typename OperationIn>
std::optional<uint32_t> ClusterCommunicator::RunGenerations(uint32_t from_generation, const OperationIn& operation_in) {
  const OperationSpan span(cluster_version_);
  const Operation* operation = operation_in(from_generation);
  if (operation == nullptr) return std::nullopt;
  span.Began(*operation);
  const std::string text = operation->name;
  const auto name = Find(text);
  const std::unique_lock<std::mutex> busy(name->busy);
  uint32_t generation = from_generation;
  if (!name->under_way) {
    Tell(*operation, generation, /*renewal=*/false);
    name->under_way = true;
    name->told = generation;
  }
  try {
    for (;;) {
      Renewal renewal(*this, *name, generation, operation_in);
      if (!local_.RunRenewable(renewal, AwaitLocalFailures(generation))) return std::nullopt;
      operation = renewal.operation;
      const Commit commit = HearCommit(*operation).commit;
      if (commit.what == Commit::kFailed) Fail(*operation, commit);
      if (commit.what == Commit::kDone) {
        TakeResult(*operation);
        span.Ended(*operation);
        name->under_way = false;
        Forget(text);
        return commit.generation;
      }
      generation = commit.generation;
      operation = operation_in(generation);
      if (operation == nullptr) return std::nullopt;  // the other ranks wait here until this rank is ready
    }
  } catch (...) {
    name->under_way = false;
    Forget(text);
    throw;
  }
}

std::shared_ptr<ClusterCommunicator::Name> ClusterCommunicator::Find(const std::string& name) {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::shared_ptr<Name>& found = names_[name];
  if (found == nullptr) found = std::make_shared<Name>();
  return found;
}

// Deletes a name that has no running operation. If a thread waits for the name, the thread's
// reference keeps the object alive.
void ClusterCommunicator::Forget(const std::string& name) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = names_.find(name);
  if (found != names_.end() && found->second.use_count() == 2) names_.erase(found);
}

void ClusterCommunicator::Check(const Operation& operation) const {
  Validate(operation, size_);
  const bool broadcast = operation.kind == Kind::kBroadcast;
  const bool gives = broadcast && SourceOn(places_, host_, operation) == rank_;
  RequireMemory(operation, /*inputs=*/!broadcast || gives, /*outputs=*/!broadcast || !gives);
  if (std::strlen(operation.name) > kMostOfName) {
    throw Error(KF_INVALID,
                Text(NameOf(operation.kind), " \"", std::string(operation.name, 80), "...\": the name has ",
                     std::strlen(operation.name), " bytes; at most ", kMostOfName, " are possible with several hosts"));
  }
}

// Notifies the transport that this rank begins the operation.
void ClusterCommunicator::Tell(const Operation& operation, uint32_t generation, bool renewal, bool more_follow) const {
  hosts::Request request;
  request.renewal = renewal;
  request.more_follow = more_follow;
  request.is_slice = IsSlice(operation);
  request.track = operation.part.track;
  request.kind = operation.kind;
  request.dtype = operation.dtype;
  request.op = operation.op;
  request.weighted = operation.weighting.applies;
  request.root = operation.root;
  request.from_generation = generation;
  request.count = CountOf(operation);
  request.signature = SignatureOf(operation);
  request.name = operation.name;
  request.what = Describe(operation);
  if (operation.sources != nullptr) request.sources = *operation.sources;
  if (operation.planes != nullptr) {
    request.has_planes = true;
    request.planes.of_rank = operation.planes->of_rank;
    request.planes.program = operation.planes->program;
    request.planes.most = operation.planes->most;
    request.planes.divisor = operation.planes->divisor;
  }
  const std::vector<char> bytes = request.Packed();
  while (send(requests_, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) {
      InterruptCheck::Run();
      continue;
    }
    if (errno == EPIPE || errno == ECONNRESET) throw Error(KF_PEER_LOST, "this host's kungfu-run has ended");
    throw SystemError("the socket to this host's transport");
  }
}

// Asks this host's transport which hosts it is waiting for, and returns the answer. Returns a
// general description if the transport doesn't know or doesn't answer.
std::string ClusterCommunicator::BehindTheTransport(const Operation& part) {
  const std::lock_guard<std::mutex> one(asking_);
  hosts::Request request;
  request.asks = true;
  request.count = ++questions_;
  const Operation& whole = part.part.of == nullptr ? part : *part.part.of;
  request.name = whole.name;
  request.track = whole.part.track;
  const std::vector<char> bytes = request.Packed();
  bool asked = send(requests_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
  for (RunTime waited; asked && waited.Look() < kAnswerLimit;) {
    pollfd answer{requests_, POLLIN, 0};
    poll(&answer, 1, 20);
    char text[sizeof request.count + hosts::kTextBytes];
    const ssize_t n = recv(requests_, text, sizeof text, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) continue;
    if (n < static_cast<ssize_t>(sizeof request.count)) break;
    // The received text may be a late answer to an earlier question.
    if (std::memcmp(text, &request.count, sizeof request.count) != 0) continue;
    if (n == static_cast<ssize_t>(sizeof request.count)) break;
    return {text + sizeof request.count, text + n};
  }
  return "the other hosts";
}

hosts::CommitAndResult ClusterCommunicator::HearCommit(const Operation& operation) {
  hosts::CommitAndResult word;
  const kf_tensor tensor{nullptr, &word, sizeof(Commit) + BytesWithCommitOf(operation)};
  local_.RunFrom(FromTransport(operation, Stage::kCommit, &tensor, 1, KF_UINT8, transport_), 0);
  return word;
}

void ClusterCommunicator::Fail(const Operation& operation, const Commit& commit) {
  char text[hosts::kTextBytes] = {};
  const kf_tensor tensor{nullptr, text, sizeof text};
  local_.RunFrom(FromTransport(operation, Stage::kText, &tensor, 1, KF_UINT8, transport_), 0);
  const auto status = static_cast<kf_status>(commit.status);
  if (commit.goes_on != 0) throw host::FailedEverywhere(status, TextOf(text));
  throw Error(status, TextOf(text));
}

void ClusterCommunicator::TakeResult(const Operation& operation) {
  const auto take = [&](const kf_tensor* tensors, size_t num_tensors) {
    local_.RunFrom(FromTransport(operation, Stage::kResult, tensors, num_tensors, operation.dtype, transport_), 0);
  };
  const size_t unit = SizeOf(operation.dtype);
  const uint64_t count = CountOf(operation);
  thread_local Memory memory;
  switch (operation.kind) {
    case Kind::kAllReduce:
      take(operation.tensors, operation.num_tensors);
      return;
    case Kind::kBroadcast:
      if (!SourceOn(places_, host_, operation)) take(operation.tensors, operation.num_tensors);
      return;
    case Kind::kAllGather: {
      if (operation.num_tensors == 1) {
        const kf_tensor all{nullptr, operation.tensors[0].output, count * size_};
        take(&all, 1);
        return;
      }
      char* const rows = memory.Get(Aligned(std::max<uint64_t>(count * size_ * unit, 1)));
      const kf_tensor all{nullptr, rows, count * size_};
      take(&all, 1);
      for (uint32_t r = 0; r < size_; r++) {
        const char* from = rows + r * count * unit;
        for (size_t i = 0; i < operation.num_tensors; i++) {
          const size_t bytes = operation.tensors[i].count * unit;
          if (bytes > 0) std::memcpy(static_cast<char*>(operation.tensors[i].output) + r * bytes, from, bytes);
          from += bytes;
        }
      }
      return;
    }
    case Kind::kReduceScatter: {
      char* const whole = memory.Get(Aligned(std::max<uint64_t>(count * unit, 1)));
      const kf_tensor all{nullptr, whole, count};
      take(&all, 1);
      const char* from = whole;
      for (size_t i = 0; i < operation.num_tensors; i++) {
        const size_t part = operation.tensors[i].count / size_ * unit;
        if (part > 0) std::memcpy(operation.tensors[i].output, from + rank_ * part, part);
        from += operation.tensors[i].count * unit;
      }
      return;
    }
    default:
      return;
  }
}

// Returns how many of this host's ranks are excluded from `generation`. Waits until the host's
// segment lists their failures, because the launcher adds a failure first to the control block, and
// later to the segment.
uint32_t ClusterCommunicator::AwaitLocalFailures(uint32_t generation) const {
  const uint32_t failed = places_.NumFailedOn(host_, generation, control_);
  while (local_control_.num_failed() < failed) {
    closure_.ThrowIfClosed();
    InterruptCheck::Run();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return failed;
}

uint32_t ClusterCommunicator::AwaitGenerationWithout(uint32_t local_generation) const {
  for (;;) {
    if (const auto found = places_.GenerationWithout(host_, local_generation, control_)) return *found;
    closure_.ThrowIfClosed();
    InterruptCheck::Run();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace kungfu
