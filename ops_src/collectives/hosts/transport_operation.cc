// The part of the transport that runs one operation. Numbers in comments refer to the invariants in
// transport.h.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/fault_point.h"
#include "base/float_environment.h"
#include "base/hash.h"
#include "collectives/dtype.h"
#include "collectives/host/transfer.h"
#include "collectives/hosts/algorithm.h"
#include "collectives/hosts/copies.h"
#include "collectives/hosts/plane_split.h"
#include "collectives/hosts/selector.h"
#include "collectives/hosts/slices.h"
#include "collectives/hosts/transport.h"
#include "collectives/hosts/transport_state.h"
#include "collectives/reduce.h"

namespace kungfu::hosts {
namespace {

constexpr auto kMoment = std::chrono::microseconds(50);
constexpr uint64_t kMeasuredEvery = 16;  // one of this many small operations with the same name is measured: see
                                         // invariant 13

size_t SmallBytesOf(const Request& request) {
  return request.has_planes ? 0 : SmallBytes(request.kind, request.dtype, request.op, request.count);
}
size_t BytesWithCommitOf(const Request& request) {
  return request.has_planes ? 0 : BytesWithCommit(request.kind, request.dtype, request.op, request.count);
}

// The check that this thread makes repeatedly while it waits for another host.
struct Awaited {
  const std::function<void()>* look = nullptr;
};
thread_local Awaited awaited;

}  // namespace

void Transport::LookWhileWaiting() {
  if (awaited.look != nullptr) (*awaited.look)();
}

void Transport::Run(Name& name, const Request& request, uint64_t number) {
  const DefaultFloatEnvironment environment;
  try {
    const size_t contributions = std::max<size_t>(request.has_planes ? request.planes.count() : places_.ranks(), 1);
    const bool whole = request.has_planes || GoesInRows(request.kind, request.dtype, request.op);
    const ScratchPool::Use scratch(*scratches_, request.count * SizeOf(request.dtype) * (whole ? contributions : 1));
    RunOrThrow(name, request, number, *scratch);
  } catch (const Closed&) {  // closed by Close or Fail
  } catch (const Error& error) {
    Fail(error.status(), error.what());
  } catch (const std::exception& error) {
    Fail(KF_INTERNAL, OwnTrouble(error));
  }
}

void Transport::RunOrThrow(Name& name, const Request& request, uint64_t number, Scratch& scratch) {
  Contribution contribution;
  contribution.generation = request.from_generation;
  bool brought = false;
  Outcome outcome;
  for (;;) {
    Place place{name, request, number, Epoch()};
    try {
      if (Agree(place, contribution, brought, outcome, scratch) && Finish(name, number, place.epoch)) break;
    } catch (const Error& error) {
      const bool moved = error.status() == KF_STALE || error.status() == KF_PEER_LOST;
      const bool is_end =
          dynamic_cast<const Closed*>(&error) != nullptr || dynamic_cast<const HostLeft*>(&error) != nullptr;
      if (!moved || is_end || !control_.recovers()) throw;
      AwaitEpochAfter(place.epoch);  // also returns if the transport is closing
    }
  }
  const bool failed = outcome.commit.what == Commit::kFailed;
  // Return if the ranks already know the outcome, or if no ranks are left.
  if (failed ? !brought : !HasRanks(host_, outcome.commit.generation)) return;
  KUNGFU_FAULT_POINT("before its ranks hear the commit");
  const bool in_pinned_buffer = contribution.pinned.HasBuffer();
  outcome.commit.in_pinned_buffer = !failed && in_pinned_buffer ? 1 : 0;
  Give(name, request, outcome.commit, outcome.text, scratch);
  KUNGFU_FAULT_POINT("before its ranks get the result");
  if (!failed && !in_pinned_buffer && BytesWithCommitOf(request) == 0) GiveResult(name, request, scratch);
  KUNGFU_FAULT_POINT("when its ranks have the result");
}

// Agrees with the other hosts on the outcome of the operation, within one epoch. Throws if the
// epoch ends first.
bool Transport::Agree(Place& place, Contribution& contribution, bool& brought, Outcome& outcome, Scratch& scratch) {
  const Request& request = place.request;
  std::vector<Header> headers;
  uint32_t generation = contribution.generation;
  for (;;) {
    Header mine;
    mine.got = outcome.epoch;
    mine.figures = meter_.figures();
    if (!brought && !contribution.failed) {
      try {
        contribution = ReduceToHost(place.name, request, place.number, generation, scratch);
        brought = true;
      } catch (const host::FailedEverywhere& error) {  // the operation has failed on all ranks of this host: see
                                                       // failure_rules.cc
        contribution.failed = true;
        contribution.status = error.status();
        contribution.text = error.what();
      }
    }
    if (brought) {
      mine.missing = contribution.missing;
      mine.generation = contribution.generation;
      mine.none = contribution.missing == places_.SizeOf(host_) ? 1 : 0;
      mine.signature = scratch.signature;
      mine.count = request.count;
      mine.weight = contribution.weight;
      CopyText(mine.text, request.what);
      if (const size_t bytes = SmallBytesOf(request); contribution.missing < places_.SizeOf(host_) && bytes > 0) {
        std::memcpy(mine.contribution, scratch.data, bytes);
      }
    } else if (contribution.failed) {
      mine.failed = 1;
      mine.status = contribution.status;
      CopyText(mine.text, contribution.text);
    }
    KUNGFU_FAULT_POINT("before the hosts meet");
    headers = Meet(place, mine);
    KUNGFU_FAULT_POINT("when the hosts have met");
    // An outcome belongs to the epoch of its headers. A host that is lost in a later epoch still
    // counts in this epoch.
    if (Epoch() != place.epoch) throw Error(KF_STALE, "the hosts go on in a new epoch");
    // See invariant 8. A host that is absent because its ranks have failed is ignored.
    uint64_t got = outcome.epoch;
    for (const Header& header : headers) {
      if (header.absent == 0 && header.got != got) got = 0;
    }
    if (outcome.epoch != 0 && got != 0) return true;
    for (const Header& header : headers) {
      KUNGFU_CHECK(header.given == 0, "a host has given an outcome that host ", host_, " lacks: ", place.name.name);
    }
    outcome = {};
    for (uint32_t h = 0; h < places_.hosts(); h++) {
      if (const auto rank = headers[h].absent != 0 && IsLost(h) ? FinishedOn(h) : std::nullopt) {
        throw HostLeft(KF_PEER_LOST,
                       Text("\"", place.name.name, "\": ", control_.PeerName(*rank),
                            " has finished, and its host is lost, cluster version ", control_.cluster_version()));
      }
    }
    if (const auto commit = FailureIn(place.name, request, headers)) {
      outcome.commit = commit->first;
      outcome.text = commit->second;
      outcome.epoch = place.epoch;
      break;
    }
    for (const Header& header : headers) generation = std::max(generation, header.generation);
    AwaitFailures(generation);
    const auto has_to_again = [&](uint32_t h) {
      if (headers[h].none != 0) return false;
      return places_.NumFailedOn(h, generation, control_) > headers[h].missing ||
             (request.has_planes && headers[h].generation < generation);
    };
    bool again = false;
    for (uint32_t h = 0; h < places_.hosts(); h++) again = again || has_to_again(h);
    if (!again) {
      if (request.more_follow && place.name.let_on != place.number && HasRanks(host_, generation)) {
        Commit commit;
        commit.what = Commit::kMore;
        Give(place.name, request, commit, "", scratch);
        place.name.let_on = place.number;
      }
      Exchange(place, generation, contribution, headers, scratch);
      KUNGFU_FAULT_POINT("when it has the hosts' result");
      outcome.commit = {};
      outcome.commit.generation = generation;
      outcome.epoch = place.epoch;
      break;
    }
    if (!has_to_again(host_)) continue;
    Commit commit;
    commit.what = Commit::kAgain;
    commit.generation = generation;
    Give(place.name, request, commit, "", scratch);
    KUNGFU_FAULT_POINT("before its ranks contribute again");
    contribution.pinned.LetGo();
    contribution.generation = generation;
    brought = false;
  }
  // The acknowledgement is needed only if the hosts may have to agree on this outcome again. This
  // can happen only if the policy is to recover and more than one host remains after a loss.
  if (control_.recovers() && places_.hosts() > 2) Acknowledge(place, outcome.epoch);
  KUNGFU_FAULT_POINT("when all hosts have the result");
  return true;
}

// ---- contributions of the host's ranks

// This host's contribution to an operation that adds up planes (planes.h). For each generation, the
// ranks send a separate request that describes their contribution.
class Transport::Renewal final : public Communicator::Renewable {
 public:
  Renewal(Transport& transport, const Name& name, const Request& request, uint64_t number, uint32_t generation,
          Scratch& scratch)
      : transport_(transport),
        name_(name),
        request_(request),
        number_(number),
        generation_(generation),
        scratch_(scratch) {}

  const Operation* In(uint32_t missing) override {
    generation_ = std::max(generation_, transport_.AwaitGenerationWithout(missing));
    no_rank_lives = missing == transport_.self_;
    if (no_rank_lives) return nullptr;
    current = generation_ == request_.from_generation ? &request_ : transport_.RenewalOf(name_, number_, generation_);
    if (current == nullptr) return nullptr;
    local_ = {};
    local_.most = 1;
    for (const uint32_t rank : transport_.places_.RanksOn(transport_.host_)) {
      local_.of_rank.push_back(current->planes.of_rank[rank]);
      local_.most = std::max(local_.most, current->planes.of_rank[rank]);
    }
    local_.of_rank.push_back(0);
    const size_t bytes = local_.count() * request_.count * SizeOf(request_.dtype);
    scratch_.data = scratch_.contribution.Get(Aligned(std::max<size_t>(bytes, 1)));
    tensor_ = {nullptr, scratch_.data, request_.count};
    operation_ = {Kind::kGatherTo, name_.name.c_str(), &tensor_, 1, request_.dtype, request_.op, transport_.self_};
    operation_.planes = &local_;
    operation_.part.signature = current->signature;
    return &operation_;
  }
  uint32_t generation() const { return generation_; }

  const Request* current = nullptr;
  bool no_rank_lives = false;  // true if no rank of the host is running any more

 private:
  Transport& transport_;
  const Name& name_;
  const Request& request_;
  const uint64_t number_;
  uint32_t generation_;
  Scratch& scratch_;
  Planes local_;
  kf_tensor tensor_{};
  Operation operation_;
};

// Returns the request for the planes of this generation, or null if no rank of this host has sent
// it yet.
const Request* Transport::RenewalOf(const Name& name, uint64_t number, uint32_t generation) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = name.renewals.find({number, generation});
  return found == name.renewals.end() ? nullptr : &found->second;
}

Transport::Contribution Transport::ReduceToHost(const Name& name, const Request& request, uint64_t number,
                                                uint32_t generation, Scratch& scratch) {
  Contribution contribution;
  const uint32_t missing = AwaitLocalFailures(generation);
  if (request.has_planes) {
    Renewal renewal(*this, name, request, number, generation, scratch);
    while (true) {
      if (const auto ended = local_->RunRenewable(renewal, missing)) {
        contribution.missing = *ended;
        break;
      }
      // If all ranks of this host have failed, for example while they computed shards, no rank will
      // send a new request.
      if (renewal.no_rank_lives || local_control_.num_failed() == self_) {
        contribution.missing = self_;
        contribution.generation = AwaitGenerationWithout(self_);
        return contribution;
      }
      // The host's ranks must first compute more shards.
      std::unique_lock<std::mutex> lock(mutex_);
      if (failed_) throw *failed_;
      if (closing_) throw Closed(KF_STALE, "this cluster version has ended");
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
    contribution.generation = renewal.generation();
    scratch.planes = renewal.current->planes;
    scratch.signature = renewal.current->signature;
    return contribution;
  }
  scratch.signature = request.signature;
  const size_t unit = SizeOf(request.dtype);
  const bool in_rows = GoesInRows(request.kind, request.dtype, request.op);
  const size_t bytes = request.count * unit * (in_rows ? places_.SizeOf(host_) : 1);
  scratch.data = scratch.contribution.Get(Aligned(std::max<size_t>(bytes, 1)));
  const kf_tensor tensor{nullptr, scratch.data, request.count};
  Operation to_host{Kind::kBarrier, name.name.c_str(), nullptr, 0, request.dtype, request.op, self_};
  to_host.part.track = name.track;
  to_host.part.signature = request.signature;
  to_host.part.patient = request.is_slice;
  if (const auto source = SourceOn(host_, request)) {
    to_host.kind = Kind::kBroadcast;
    to_host.root = places_.LocalOf(*source);
  } else if (in_rows) {
    to_host.kind = Kind::kGatherTo;
  } else if (Reduces(request.kind)) {
    to_host.kind = Kind::kReduceTo;
    to_host.weighting.applies = request.weighted;
    to_host.weighting.total = &contribution.weight;
  }
  if (to_host.kind != Kind::kBarrier) {
    to_host.tensors = &tensor;
    to_host.num_tensors = 1;
  }
  to_host.part.pins_buffer = PinsBuffer(request.kind, request.dtype, request.op);
  contribution.pinned = local_->RunPinned(to_host, missing);
  if (contribution.pinned.lone() >= 0)
    scratch.data = contribution.pinned.Of(static_cast<uint32_t>(contribution.pinned.lone()));
  contribution.missing = contribution.pinned.generation();
  contribution.generation = std::max(generation, AwaitGenerationWithout(contribution.missing));
  return contribution;
}

// ---- messages between the hosts

tcp::Tag Transport::Place::TagOf(Message message) const {
  return tcp::Tag::Of(Fnv1a(&message, sizeof message, name.hash), number);
}

// Exchanges headers, and returns the headers of all hosts in this round. If a host sends no more
// headers for the operation, creates a header for this host (Header::absent).
std::vector<Transport::Header> Transport::Meet(Place& place, const Header& mine) {
  const tcp::Tag tag = place.TagOf(Message::kHeader).Step(place.attempt++);
  std::vector<Header> headers(places_.hosts());
  headers[host_] = mine;
  const auto be_absent = [&](uint32_t h, bool gave) {
    Header& header = headers[h] = {};
    header.absent = header.none = 1;
    header.given = gave ? 1 : 0;
    header.missing = places_.SizeOf(h);
    if (!gave && !FinishedOn(h)) header.generation = AwaitGenerationWithout(h, header.missing);
  };
  Trade(place, tag, mine, headers, be_absent);
  return headers;
}

// Sends `mine` to all other hosts, and receives their values in `theirs`. If a host never joined
// the operation or has left it, calls absent(host, gave). `gave` is true if the host has given the
// outcome to its ranks. When `absent` is called, no receive can write to theirs[host] any more.
template <typename Words, typename Absent>
void Transport::Trade(const Place& place, const tcp::Tag& tag, const Words& mine, std::vector<Words>& theirs,
                      const Absent& absent) {
  std::vector<tcp::Mesh::Ticket> hearing(places_.hosts()), saying(places_.hosts());
  std::vector<bool> met(places_.hosts());
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (h == host_) continue;
    try {
      ThrowIfAbsent(h, place);
      hearing[h] = mesh_.Receive(place.epoch, h, tag, &theirs[h], sizeof(Words));
      saying[h] = mesh_.Send(place.epoch, h, tag, &mine, sizeof mine);
      met[h] = true;
    } catch (const AbsentHost& is) {
      absent(h, is.gave);
    }
    KUNGFU_FAULT_POINT("when it has said its word to a host");
  }
  KUNGFU_FAULT_POINT("when it has said its word");
  // Clear the list of awaited hosts even if the loss of a host ends the wait. Otherwise an answer
  // to a rank could name hosts that are no longer awaited.
  struct Noted {
    ~Noted() {
      if (!any) return;
      std::lock_guard<std::mutex> guard(transport.mutex_);
      name.awaited.clear();
    }
    const Transport& transport;
    Name& name;
    bool any = false;
  } noted{*this, place.name};
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (!met[h]) continue;
    try {
      AwaitHost(hearing[h], saying[h], [&] {
        ThrowIfAbsent(h, place);
        std::lock_guard<std::mutex> guard(mutex_);
        place.name.awaited.clear();
        for (uint32_t other = 0; other < places_.hosts(); other++) {
          if (!hearing[other].IsDone()) place.name.awaited.push_back(other);
        }
        noted.any = true;
      });
    } catch (const AbsentHost& is) {
      hearing[h] = {};  // withdraws the receive
      absent(h, is.gave);
    }
  }
}

// Waits for a host's message. Calls `look` before it sleeps, and repeatedly while it waits.
template <typename Look>
void Transport::AwaitHost(const tcp::Mesh::Ticket& heard, const tcp::Mesh::Ticket& said, const Look& look) {
  const std::function<void()> looking = look;
  awaited.look = &looking;
  try {
    const InterruptCheck check(&LookWhileWaiting);
    mesh_.Wait(heard);
    mesh_.Wait(said);
  } catch (...) {
    awaited.look = nullptr;
    throw;
  }
  awaited.look = nullptr;
}

// Waits until all hosts have the outcome of the operation (see invariant 7).
void Transport::Acknowledge(const Place& place, uint64_t got) {
  const tcp::Tag tag = place.TagOf(Message::kAcknowledgement);
  std::vector<uint64_t> theirs(places_.hosts());
  Trade(place, tag, got, theirs, [](uint32_t, bool) {});
}

// Records that the host's ranks are about to get the outcome. Returns false if a new epoch has
// begun, because the hosts must then agree on the outcome again. See invariant 9.
bool Transport::Finish(Name& name, uint64_t number, uint64_t epoch) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (epoch_ != epoch) return false;
  name.given = number;
  return true;
}

uint64_t Transport::Epoch() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return epoch_;
}

void Transport::AwaitEpochAfter(uint64_t epoch) const {
  while (Epoch() == epoch) Pause();
}

// Returns the failure that the headers imply, or none if there is no failure. The result is the
// same on all hosts.
std::optional<std::pair<Commit, std::string>> Transport::FailureIn(const Name& name, const Request& request,
                                                                   const std::vector<Header>& headers) const {
  Commit commit;
  commit.what = Commit::kFailed;
  commit.goes_on = 1;
  for (const Header& header : headers) {
    if (header.failed == 0) continue;
    commit.status = static_cast<uint8_t>(header.status);
    return std::make_pair(commit, TextOf(header.text));
  }
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    const auto source = SourceOn(h, request);
    if (!source || headers[h].none == 0) continue;
    commit.status = KF_PEER_LOST;
    return std::make_pair(commit, Text("broadcast \"", name.name, "\": ", *source == request.root ? "its root, " : "",
                                       "rank ", *source, ", failed, cluster version ", control_.cluster_version()));
  }
  // A host whose planes belong to an earlier generation isn't compared, because it must contribute
  // again.
  uint32_t latest = 0;
  for (const Header& header : headers) latest = std::max(latest, header.generation);
  const Header* first = nullptr;
  bool equal = true;
  for (const Header& header : headers) {
    if (header.none != 0 || (request.has_planes && header.generation < latest)) continue;
    if (first == nullptr) first = &header;
    equal = equal && header.signature == first->signature && header.count == first->count;
  }
  if (equal) return std::nullopt;
  std::vector<std::pair<std::string, std::string>> brought;
  for (uint32_t h = 0; h < places_.hosts(); h++) brought.emplace_back(mesh_.name(h), TextOf(headers[h].text));
  commit.status = KF_MISMATCH;
  return std::make_pair(commit, MismatchText("hosts", name.name, brought));
}

// For a broadcast, returns the rank on `host` from which the host's transport gets the data.
std::optional<uint32_t> Transport::SourceOn(uint32_t host, const Request& request) const {
  if (request.kind != Kind::kBroadcast) return std::nullopt;
  return places_.SourceOn(host, request.root, request.sources);
}

bool Transport::HasRanks(uint32_t host, uint32_t generation) const {
  return places_.NumFailedOn(host, generation, control_) < places_.SizeOf(host);
}

// Exchanges the contributions and computes the result. Afterwards `scratch.out` points to the
// result. The contribution stays unchanged.
void Transport::Exchange(const Place& place, uint32_t generation, const Contribution& contribution,
                         const std::vector<Header>& headers, Scratch& scratch) {
  const Request& request = place.request;
  scratch.elements = request.count;
  const tcp::Tag tag = place.TagOf(Message::kData);
  if (request.has_planes) return ExchangePlanes(place, tag, generation, scratch);
  if (GoesInRows(request.kind, request.dtype, request.op)) return ExchangeRows(place, tag, generation, scratch);
  scratch.out = scratch.data;
  if (!HasRanks(host_, generation)) return;  // this host has no ranks left that need the result
  if (request.kind == Kind::kBroadcast) return ExchangeCopy(place, tag, generation, headers, scratch);
  Members members;
  std::vector<Figures> measured;  // the measurements of all members
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (!HasRanks(h, generation)) continue;
    members.push_back(h);
    measured.push_back(headers[h].figures);
  }
  const size_t bytes = request.count * SizeOf(request.dtype);
  const Group group(mesh_, place.epoch, members);
  if (!Reduces(request.kind)) return;
  scratch.out = contribution.pinned.HasBuffer() ? contribution.pinned.Of(self_)
                                                : scratch.result.Get(Aligned(std::max<size_t>(bytes, 1)));
  const auto algorithm = SelectAlgorithm(strategy_, measured, bytes, request.is_slice ? kTracks : 1);
  const bool all_have_measured =
      std::all_of(measured.begin(), measured.end(), [](const Figures& figures) { return figures.step_ns > 0; });
  const bool doubles = dynamic_cast<const Doubling*>(algorithm.get()) != nullptr;
  if (SmallBytesOf(request) > 0 && doubles && all_have_measured && place.number % kMeasuredEvery != 1) {
    return ReduceSmall(place, generation, members, headers, scratch);
  }
  const bool mean = request.op == KF_MEAN;
  const void* in = scratch.data;
  if (mean) {
    in = Scaled(request, generation, headers, host_, scratch.data,
                scratch.other.Get(Aligned(std::max<size_t>(bytes, 1))));
  }
  const auto reduce = [&] {
    algorithm->Run({group, tag, request.dtype, mean ? KF_SUM : request.op, in, scratch.out, request.count});
  };
  if (strategy_ != Strategy::kAuto || group.size() == 1) return reduce();
  meter_.Begin(Meter::Clock::now());
  try {
    reduce();
  } catch (...) {
    meter_.End(Meter::Clock::now(), nullptr);
    throw;
  }
  const Cost cost = algorithm->CostOf(group.size(), bytes);
  meter_.End(Meter::Clock::now(), &cost);
}

// Broadcasts to the hosts that have no source rank. Each of these hosts is assigned to a host that
// has a source rank, and gets the data from that host.
void Transport::ExchangeCopy(const Place& place, const tcp::Tag& tag, uint32_t generation,
                             const std::vector<Header>& headers, Scratch& scratch) {
  Members giving, taking;
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (SourceOn(h, place.request)) {
      giving.push_back(h);
    } else if (HasRanks(h, generation)) {
      taking.push_back(h);
    }
  }
  for (size_t g = 0; g < giving.size(); g++) {
    Members members{giving[g]};
    for (size_t t = g; t < taking.size(); t += giving.size()) members.push_back(taking[t]);
    if (members.size() == 1 || std::find(members.begin(), members.end(), host_) == members.end()) continue;
    KUNGFU_CHECK(HasRanks(giving[g], generation), "a source rank's host has no ranks in generation ", generation);
    std::sort(members.begin(), members.end());
    const auto root = std::find(members.begin(), members.end(), giving[g]) - members.begin();
    std::vector<Figures> measured;
    for (const uint32_t h : members) measured.push_back(headers[h].figures);
    const size_t bytes = place.request.count * SizeOf(place.request.dtype);
    Broadcast(Group(mesh_, place.epoch, members), tag, SelectBroadcastShape(strategy_, measured, bytes),
              static_cast<uint32_t>(root), scratch.data, bytes);
  }
}

// Reduces contributions that arrived in the headers.
void Transport::ReduceSmall(const Place& place, uint32_t generation, const Members& members,
                            const std::vector<Header>& headers, Scratch& scratch) const {
  const Request& request = place.request;
  const size_t room = Aligned(kSmallBytes);
  char* const scaled = scratch.other.Get(members.size() * room);
  std::vector<const void*> contributions;
  for (const uint32_t h : members) {
    const void* contribution = headers[h].contribution;
    if (request.op == KF_MEAN) {
      contribution =
          Scaled(request, generation, headers, h, headers[h].contribution, scaled + contributions.size() * room);
    }
    contributions.push_back(contribution);
  }
  Doubling::ReduceAlone(request.dtype, request.op == KF_MEAN ? KF_SUM : request.op, std::move(contributions),
                        scratch.out, request.count);
}

// Returns a host's contribution to a mean, scaled by the host's share of the total weight. Writes
// the scaled contribution to `scaled`. If the share is 1, returns `contribution` itself. If all
// weights are 0, all ranks count equally, as they do on one host.
const void* Transport::Scaled(const Request& request, uint32_t generation, const std::vector<Header>& headers,
                              uint32_t host, const char* contribution, char* scaled) const {
  const auto ranks = [&](uint32_t h) { return places_.SizeOf(h) - places_.NumFailedOn(h, generation, control_); };
  uint64_t all = 0, own = headers[host].weight;
  for (const Header& header : headers) all += header.weight;
  if (!request.weighted || all == 0) {
    own = ranks(host);
    all = 0;
    for (uint32_t h = 0; h < places_.hosts(); h++) all += ranks(h);
  }
  if (own == all) return contribution;
  if (own == 0) {  // a host with weight 0 may contribute any values, even NaN
    std::memset(scaled, 0, request.count * SizeOf(request.dtype));
    return scaled;
  }
  const double share = static_cast<double>(own) / static_cast<double>(all);
  const void* source = contribution;
  BlendFor(request.dtype)(scaled, &source, &share, 1, request.count);
  return scaled;
}

// Sends this host's rows to all other hosts. The result is either the rows of all ranks, or their
// mean.
void Transport::ExchangeRows(const Place& place, const tcp::Tag& tag, uint32_t generation, Scratch& scratch) {
  const Request& request = place.request;
  const size_t row = request.count * SizeOf(request.dtype);
  const Members living = LivingIn(generation);
  char* const rows = scratch.result.Get(Aligned(std::max<size_t>(row * places_.ranks(), 1)));
  char* const arriving = scratch.other.Get(Aligned(std::max<size_t>(row * places_.ranks(), 1)));
  scratch.out = rows;
  if (!HasRanks(host_, generation)) return;
  std::memset(rows, 0, row * places_.ranks());
  std::vector<char*> from(places_.hosts());
  std::vector<tcp::Mesh::Ticket> tickets;
  char* next = arriving;
  const auto bytes_of = [&](uint32_t h) {
    return row * (places_.SizeOf(h) - places_.NumFailedOn(h, generation, control_));
  };
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    from[h] = h == host_ ? scratch.data : next;
    if (h == host_ || !HasRanks(h, generation)) continue;
    next += bytes_of(h);
    tickets.push_back(mesh_.Receive(place.epoch, h, tag, from[h], bytes_of(h)));
    tickets.push_back(mesh_.Send(place.epoch, h, tag, scratch.data, bytes_of(host_)));
  }
  for (const auto& ticket : tickets) mesh_.Wait(ticket);
  std::vector<const void*> sources;
  for (const uint32_t rank : living) {
    char*& at = from[places_.HostOf(rank)];
    if (row > 0) std::memcpy(rows + rank * row, at, row);
    sources.push_back(rows + rank * row);
    at += row;
  }
  if (request.kind == Kind::kAllGather) {
    scratch.elements = request.count * places_.ranks();
    return;
  }
  scratch.out = arriving;
  ReductionFor(request.dtype, request.op)(arriving, sources.data(), static_cast<unsigned>(sources.size()),
                                          request.count);
}

void Transport::ExchangePlanes(const Place& place, const tcp::Tag& tag, uint32_t generation, Scratch& scratch) {
  scratch.out = scratch.data;
  if (!HasRanks(host_, generation)) return;
  const Request& request = place.request;
  const Planes& planes = scratch.planes;
  const size_t bytes = request.count * SizeOf(request.dtype);
  const PlaneSplit split = SplitPlanes(planes, places_);
  // The memory of this host's planes, indexed by their number in the whole operation.
  std::vector<const void*> own(planes.count());
  size_t number = 0, brought = 0;
  for (uint32_t rank = 0; rank < places_.ranks(); rank++) {
    for (uint32_t p = 0; p < planes.of_rank[rank]; p++, number++) {
      if (places_.HostOf(rank) == host_) own[number] = scratch.data + brought++ * bytes;
    }
  }
  char* const nodes = scratch.other.Get(Aligned(std::max<size_t>(split.rest.count() * bytes, 1)));
  std::vector<const void*> sources;
  std::vector<tcp::Mesh::Ticket> tickets;
  char* next = nodes;
  const auto add_up = [&](const Planes& program, char* to, std::vector<const void*> from) {
    Operation operation{Kind::kAllReduce, "", nullptr, 0, request.dtype, KF_SUM};
    operation.planes = &program;
    const host::Reducer reduce(operation);
    reduce(to, from.data(), static_cast<uint32_t>(from.size()), bytes, /*stream=*/false);
  };
  const char* mine = nullptr;
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    const size_t all = split.nodes[h].size() * bytes;
    if (h == host_) {
      mine = next;
      for (size_t k = 0; k < split.nodes[h].size(); k++) {
        Planes program;
        program.program = split.nodes[h][k];
        add_up(program, next + k * bytes, own);
      }
    } else if (all > 0) {
      tickets.push_back(mesh_.Receive(place.epoch, h, tag, next, all));
    }
    for (size_t k = 0; k < split.nodes[h].size(); k++) sources.push_back(next + k * bytes);
    next += all;
  }
  const size_t sent = split.nodes[host_].size() * bytes;
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (h == host_ || sent == 0 || !HasRanks(h, generation)) continue;
    tickets.push_back(mesh_.Send(place.epoch, h, tag, mine, sent));
  }
  for (const auto& ticket : tickets) mesh_.Wait(ticket);
  scratch.out = scratch.result.Get(Aligned(std::max<size_t>(bytes, 1)));
  add_up(split.rest, scratch.out, sources);
}

// ---- results for the host's ranks

void Transport::Give(const Name& name, const Request& request, const Commit& commit, const std::string& text,
                     const Scratch& scratch) {
  const auto give = [&](Stage stage, const void* data, size_t bytes) {
    const kf_tensor tensor{data, nullptr, bytes};
    Operation operation{Kind::kBroadcast, name.name.c_str(), &tensor, 1, KF_UINT8, KF_SUM, self_};
    operation.part.stage = stage;
    operation.part.track = name.track;
    operation.part.signature = scratch.signature;
    local_->RunFrom(operation, 0);
  };
  CommitAndResult word;
  word.commit = commit;
  const size_t bytes = BytesWithCommitOf(request);
  if (bytes > 0 && commit.what == Commit::kDone) std::memcpy(word.result, scratch.out, bytes);
  give(Stage::kCommit, &word, sizeof commit + bytes);
  if (commit.what != Commit::kFailed) return;
  char field[kTextBytes] = {};
  CopyText(field, text);
  give(Stage::kText, field, sizeof field);
}

void Transport::GiveResult(const Name& name, const Request& request, const Scratch& scratch) {
  if (request.kind == Kind::kBarrier || SourceOn(host_, request)) return;
  const kf_tensor tensor{scratch.out, nullptr, scratch.elements};
  Operation operation{Kind::kBroadcast, name.name.c_str(), &tensor, 1, request.dtype, KF_SUM, self_};
  operation.part.stage = Stage::kResult;
  operation.part.track = name.track;
  operation.part.signature = scratch.signature;
  operation.part.patient = request.is_slice;
  local_->RunFrom(operation, 0);
}

// ---- failures

Members Transport::LivingIn(uint32_t generation) const {
  Members living;
  for (uint32_t rank = 0; rank < places_.ranks(); rank++) living.push_back(rank);
  for (uint32_t d = 0; d < generation; d++) {
    living.erase(std::find(living.begin(), living.end(), control_.FailedRank(d)));
  }
  return living;
}

// Waits until the control block lists `num_failed` failures (see invariant 5).
void Transport::AwaitFailures(uint32_t num_failed) const {
  while (control_.num_failed() < num_failed) Pause();
}

// Returns how many of this host's ranks are excluded from `generation`. Waits until the host's
// segment lists their failures.
uint32_t Transport::AwaitLocalFailures(uint32_t generation) const {
  AwaitFailures(generation);
  const uint32_t failed = places_.NumFailedOn(host_, generation, control_);
  while (local_control_.num_failed() < failed) Pause();
  return failed;
}

uint32_t Transport::AwaitGenerationWithout(uint32_t host, uint32_t missing) const {
  for (;;) {
    if (const auto found = places_.GenerationWithout(host, missing, control_)) return *found;
    Pause();
  }
}

// Returns a rank of `host` that has ended without leaving, so that the other ranks can't recover
// (EndedForAll). Returns none if there is no such rank.
std::optional<uint32_t> Transport::FinishedOn(uint32_t host) const {
  for (const uint32_t rank : places_.RanksOn(host)) {
    if (control_.EndedForAll(rank)) return rank;
  }
  return std::nullopt;
}

void Transport::Pause() const {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (failed_) throw *failed_;
    if (closing_) throw Closed(KF_STALE, "this cluster version has ended");
  }
  std::this_thread::sleep_for(kMoment);
}

}  // namespace kungfu::hosts
