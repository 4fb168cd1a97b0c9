// One operation at a link. (The numbers are those of link.h.)
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
#include "collectives/hosts/link.h"
#include "collectives/hosts/link_state.h"
#include "collectives/hosts/plane_split.h"
#include "collectives/hosts/selector.h"
#include "collectives/hosts/slices.h"
#include "collectives/reduce.h"

namespace kungfu::hosts {
namespace {

constexpr auto kMoment = std::chrono::microseconds(50);
constexpr uint64_t kMeasuredEvery = 16;  // of the operations of a name with few bytes; see 13

size_t SmallBytesOf(const Request& request) {
  return request.has_planes ? 0 : SmallBytes(request.kind, request.dtype, request.op, request.count);
}
size_t BytesWithVerdictOf(const Request& request) {
  return request.has_planes ? 0 : BytesWithVerdict(request.kind, request.dtype, request.op, request.count);
}

// What a wait for another host's header looks at meanwhile; of this thread.
struct Awaited {
  const std::function<void()>* look = nullptr;
};
thread_local Awaited awaited;

}  // namespace

void Link::LookWhileWaiting() {
  if (awaited.look != nullptr) (*awaited.look)();
}

void Link::Run(Name& name, const Request& request, uint64_t number) {
  const DefaultFloatEnvironment environment;
  try {
    const size_t parts = std::max<size_t>(request.has_planes ? request.planes.count() : places_.ranks(), 1);
    const bool whole = request.has_planes || GoesInRows(request.kind, request.dtype, request.op);
    const ScratchPool::Use scratch(*scratches_, request.count * SizeOf(request.dtype) * (whole ? parts : 1));
    RunOrThrow(name, request, number, *scratch);
  } catch (const Closed&) {  // by Close or Fail
  } catch (const Error& error) {
    Fail(error.status(), error.what());
  } catch (const std::exception& error) {
    Fail(KF_INTERNAL, OwnTrouble(error));
  }
}

void Link::RunOrThrow(Name& name, const Request& request, uint64_t number, Scratch& scratch) {
  Part part;
  part.generation = request.from_generation;
  bool brought = false;
  Outcome outcome;
  for (;;) {
    Place place{name, request, number, Epoch()};
    try {
      if (Agree(place, part, brought, outcome, scratch) && Finish(name, number, place.epoch)) break;
    } catch (const Error& error) {
      const bool moved = error.status() == KF_STALE || error.status() == KF_PEER_LOST;
      const bool is_end =
          dynamic_cast<const Closed*>(&error) != nullptr || dynamic_cast<const HostLeft*>(&error) != nullptr;
      if (!moved || is_end || !board_.recovers()) throw;
      AwaitEpochAfter(place.epoch);  // or the end, if that is what it was
    }
  }
  const bool failed = outcome.verdict.what == Verdict::kFailed;
  if (failed ? !brought : !HasRanks(host_, outcome.verdict.generation)) return;  // they know it, or there are none
  KUNGFU_FAULT_POINT("before its ranks hear the verdict");
  const bool in_lane = part.kept.HasLane();
  outcome.verdict.in_lane = !failed && in_lane ? 1 : 0;
  Give(name, request, outcome.verdict, outcome.text, scratch);
  KUNGFU_FAULT_POINT("before its ranks get the result");
  if (!failed && !in_lane && BytesWithVerdictOf(request) == 0) GiveResult(name, request, scratch);
  KUNGFU_FAULT_POINT("when its ranks have the result");
}

// In one epoch: what comes of the operation. False: the epoch is over.
bool Link::Agree(Place& place, Part& part, bool& brought, Outcome& outcome, Scratch& scratch) {
  const Request& request = place.request;
  std::vector<Header> headers;
  uint32_t generation = part.generation;
  for (;;) {
    Header mine;
    mine.got = outcome.epoch;
    mine.figures = meter_.figures();
    if (!brought && !part.failed) {
      try {
        part = BringUp(place.name, request, place.number, generation, scratch);
        brought = true;
      } catch (const host::FailedEverywhere& error) {  // at all of this host's ranks: see failure_rules.cc
        part.failed = true;
        part.status = error.status();
        part.text = error.what();
      }
    }
    if (brought) {
      mine.missing = part.missing;
      mine.generation = part.generation;
      mine.none = part.missing == places_.SizeOf(host_) ? 1 : 0;
      mine.signature = scratch.signature;
      mine.count = request.count;
      mine.weight = part.weight;
      CopyText(mine.text, request.what);
      if (const size_t bytes = SmallBytesOf(request); part.missing < places_.SizeOf(host_) && bytes > 0) {
        std::memcpy(mine.part, scratch.data, bytes);
      }
    } else if (part.failed) {
      mine.failed = 1;
      mine.status = part.status;
      CopyText(mine.text, part.text);
    }
    KUNGFU_FAULT_POINT("before the hosts meet");
    headers = Meet(place, mine);
    KUNGFU_FAULT_POINT("when the hosts have met");
    // Who is lost in a later epoch isn't so in this one: an outcome belongs to the epoch whose headers it comes from.
    if (Epoch() != place.epoch) throw Error(KF_STALE, "the hosts go on in a new epoch");
    // See 8. Who is absent because its ranks are dead has nothing to say of it.
    uint64_t got = outcome.epoch;
    for (const Header& header : headers) {
      if (header.absent == 0 && header.got != got) got = 0;
    }
    if (outcome.epoch != 0 && got != 0) return true;
    for (const Header& header : headers) {
      KUNGFU_CHECK(header.given == 0, "a host has given what host ", host_, " has not: ", place.name.name);
    }
    outcome = {};
    for (uint32_t h = 0; h < places_.hosts(); h++) {
      if (const auto rank = headers[h].absent != 0 && IsLost(h) ? FinishedOn(h) : std::nullopt) {
        throw HostLeft(KF_PEER_LOST,
                       Text("\"", place.name.name, "\": ", board_.PeerName(*rank),
                            " has finished, and its host is lost, cluster version ", board_.cluster_version()));
      }
    }
    if (const auto verdict = VerdictOn(place.name, request, headers)) {
      outcome.verdict = verdict->first;
      outcome.text = verdict->second;
      outcome.epoch = place.epoch;
      break;
    }
    for (const Header& header : headers) generation = std::max(generation, header.generation);
    AwaitDeaths(generation);
    const auto has_to_again = [&](uint32_t h) {
      if (headers[h].none != 0) return false;
      return places_.DeadOn(h, generation, board_) > headers[h].missing ||
             (request.has_planes && headers[h].generation < generation);
    };
    bool again = false;
    for (uint32_t h = 0; h < places_.hosts(); h++) again = again || has_to_again(h);
    if (!again) {
      if (request.more_follow && place.name.let_on != place.number && HasRanks(host_, generation)) {
        Verdict verdict;
        verdict.what = Verdict::kMore;
        Give(place.name, request, verdict, "", scratch);
        place.name.let_on = place.number;
      }
      Exchange(place, generation, part, headers, scratch);
      KUNGFU_FAULT_POINT("when it has the hosts' result");
      outcome.verdict = {};
      outcome.verdict.generation = generation;
      outcome.epoch = place.epoch;
      break;
    }
    if (!has_to_again(host_)) continue;
    Verdict verdict;
    verdict.what = Verdict::kAgain;
    verdict.generation = generation;
    Give(place.name, request, verdict, "", scratch);
    KUNGFU_FAULT_POINT("before its ranks bring their parts again");
    part.kept.LetGo();
    part.generation = generation;
    brought = false;
  }
  // Without losses of hosts nobody is to agree on anything later.
  if (board_.recovers() && places_.hosts() > 2) Acknowledge(place, outcome.epoch);
  KUNGFU_FAULT_POINT("when all hosts have the result");
  return true;
}

// ---- what the host's ranks bring

// An operation with planes: how its ranks bring it in each generation they say themselves.
class Link::Renewal final : public Communicator::Renewable {
 public:
  Renewal(Link& link, const Name& name, const Request& request, uint64_t number, uint32_t generation, Scratch& scratch)
      : link_(link), name_(name), request_(request), number_(number), generation_(generation), scratch_(scratch) {}

  const Operation* In(uint32_t missing) override {
    generation_ = std::max(generation_, link_.AwaitGenerationWithout(missing));
    nobody = missing == link_.self_;
    if (nobody) return nullptr;
    current = generation_ == request_.from_generation ? &request_ : link_.RenewalOf(name_, number_, generation_);
    if (current == nullptr) return nullptr;
    local_ = {};
    local_.most = 1;
    for (const uint32_t rank : link_.places_.RanksOn(link_.host_)) {
      local_.of_rank.push_back(current->planes.of_rank[rank]);
      local_.most = std::max(local_.most, current->planes.of_rank[rank]);
    }
    local_.of_rank.push_back(0);
    const size_t bytes = local_.count() * request_.count * SizeOf(request_.dtype);
    scratch_.data = scratch_.part.Get(Aligned(std::max<size_t>(bytes, 1)));
    tensor_ = {nullptr, scratch_.data, request_.count};
    operation_ = {Kind::kGatherTo, name_.name.c_str(), &tensor_, 1, request_.dtype, request_.op, link_.self_};
    operation_.planes = &local_;
    operation_.part.signature = current->signature;
    return &operation_;
  }
  uint32_t generation() const { return generation_; }

  const Request* current = nullptr;
  bool nobody = false;  // no rank of the host lives

 private:
  Link& link_;
  const Name& name_;
  const Request& request_;
  const uint64_t number_;
  uint32_t generation_;
  Scratch& scratch_;
  Planes local_;
  kf_tensor tensor_{};
  Operation operation_;
};

// How this generation's planes are brought; null: no rank of this host has said so yet.
const Request* Link::RenewalOf(const Name& name, uint64_t number, uint32_t generation) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = name.renewals.find({number, generation});
  return found == name.renewals.end() ? nullptr : &found->second;
}

Link::Part Link::BringUp(const Name& name, const Request& request, uint64_t number, uint32_t generation,
                         Scratch& scratch) {
  Part part;
  const uint32_t missing = AwaitLocalDeaths(generation);
  if (request.has_planes) {
    Renewal renewal(*this, name, request, number, generation, scratch);
    while (true) {
      if (const auto ended = local_->RunRenewable(renewal, missing)) {
        part.missing = *ended;
        break;
      }
      // Where all have died, perhaps in the midst of computing shards, nobody says any more how it is brought.
      if (renewal.nobody || local_board_.deaths() == self_) {
        part.missing = self_;
        part.generation = AwaitGenerationWithout(self_);
        return part;
      }
      // Its ranks have shards to compute first.
      std::unique_lock<std::mutex> lock(mutex_);
      if (failed_) throw *failed_;
      if (closing_) throw Closed(KF_STALE, "this cluster version is over");
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
    part.generation = renewal.generation();
    scratch.planes = renewal.current->planes;
    scratch.signature = renewal.current->signature;
    return part;
  }
  scratch.signature = request.signature;
  const size_t unit = SizeOf(request.dtype);
  const bool in_rows = GoesInRows(request.kind, request.dtype, request.op);
  const size_t bytes = request.count * unit * (in_rows ? places_.SizeOf(host_) : 1);
  scratch.data = scratch.part.Get(Aligned(std::max<size_t>(bytes, 1)));
  const kf_tensor tensor{nullptr, scratch.data, request.count};
  Operation up{Kind::kBarrier, name.name.c_str(), nullptr, 0, request.dtype, request.op, self_};
  up.part.track = name.track;
  up.part.signature = request.signature;
  up.part.patient = request.is_slice;
  if (const auto giver = GiverOn(host_, request)) {
    up.kind = Kind::kBroadcast;
    up.root = places_.LocalOf(*giver);
  } else if (in_rows) {
    up.kind = Kind::kGatherTo;
  } else if (Reduces(request.kind)) {
    up.kind = Kind::kReduceTo;
    up.weighting.applies = request.weighted;
    up.weighting.total = &part.weight;
  }
  if (up.kind != Kind::kBarrier) {
    up.tensors = &tensor;
    up.num_tensors = 1;
  }
  up.part.keeps_lane = KeepsLane(request.kind, request.dtype, request.op);
  part.kept = local_->RunKept(up, missing);
  if (part.kept.lone() >= 0) scratch.data = part.kept.Of(static_cast<uint32_t>(part.kept.lone()));
  part.missing = part.kept.generation();
  part.generation = std::max(generation, AwaitGenerationWithout(part.missing));
  return part;
}

// ---- what the hosts tell each other

tcp::Tag Link::Place::TagOf(Message message) const {
  return tcp::Tag::Of(Fnv1a(&message, sizeof message, name.hash), number);
}

// All hosts' headers of this round. In the place of a host that has none any more is what follows from that.
std::vector<Link::Header> Link::Meet(Place& place, const Header& mine) {
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

// Says `mine` to all other hosts, and hears theirs; of those that have no part in the operation (any more) it calls
// absent(host, whether it has given the outcome), when nobody writes theirs.
template <typename Words, typename Absent>
void Link::Trade(const Place& place, const tcp::Tag& tag, const Words& mine, std::vector<Words>& theirs,
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
  // Also if a loss ends it: what the wait before it has noted must not name a rank any more.
  struct Noted {
    ~Noted() {
      if (!any) return;
      std::lock_guard<std::mutex> guard(link.mutex_);
      name.awaited.clear();
    }
    const Link& link;
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
      hearing[h] = {};  // withdrawn
      absent(h, is.gave);
    }
  }
}

// `look` is called before it sleeps, and now and then.
template <typename Look>
void Link::AwaitHost(const tcp::Mesh::Ticket& heard, const tcp::Mesh::Ticket& said, const Look& look) const {
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

// Returns when all hosts have what came of the operation; see 7.
void Link::Acknowledge(const Place& place, uint64_t got) {
  const tcp::Tag tag = place.TagOf(Message::kAcknowledgement);
  std::vector<uint64_t> theirs(places_.hosts());
  Trade(place, tag, got, theirs, [](uint32_t, bool) {});
}

// Its ranks are about to get the outcome. False: too late, it is to be agreed on anew. See 9.
bool Link::Finish(Name& name, uint64_t number, uint64_t epoch) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (epoch_ != epoch) return false;
  name.given = number;
  return true;
}

uint64_t Link::Epoch() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return epoch_;
}

void Link::AwaitEpochAfter(uint64_t epoch) const {
  while (Epoch() == epoch) Pause();
}

// The failure that follows from what was brought, the same at all hosts.
std::optional<std::pair<Verdict, std::string>> Link::VerdictOn(const Name& name, const Request& request,
                                                               const std::vector<Header>& headers) const {
  Verdict verdict;
  verdict.what = Verdict::kFailed;
  verdict.goes_on = 1;
  for (const Header& header : headers) {
    if (header.failed == 0) continue;
    verdict.status = static_cast<uint8_t>(header.status);
    return std::make_pair(verdict, TextOf(header.text));
  }
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    const auto giver = GiverOn(h, request);
    if (!giver || headers[h].none == 0) continue;
    verdict.status = KF_PEER_LOST;
    return std::make_pair(verdict, Text("broadcast \"", name.name, "\": ", *giver == request.root ? "its root, " : "",
                                        "rank ", *giver, ", died, cluster version ", board_.cluster_version()));
  }
  // With planes those who made them for an earlier generation have to again anyway.
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
  std::string text = Text("the hosts brought different operations under the name \"", name.name, "\": ");
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    text += Text(h == 0 ? "" : "; ", mesh_.name(h), ": ", TextOf(headers[h].text));
  }
  verdict.status = KF_MISMATCH;
  return std::make_pair(verdict, text);
}

// Of a broadcast: whose part the link of `host` has from its own ranks.
std::optional<uint32_t> Link::GiverOn(uint32_t host, const Request& request) const {
  if (request.kind != Kind::kBroadcast) return std::nullopt;
  return places_.GiverOn(host, request.root, request.givers);
}

bool Link::HasRanks(uint32_t host, uint32_t generation) const {
  return places_.DeadOn(host, generation, board_) < places_.SizeOf(host);
}

// The result into scratch.out. What was brought stays as it is.
void Link::Exchange(const Place& place, uint32_t generation, const Part& part, const std::vector<Header>& headers,
                    Scratch& scratch) {
  const Request& request = place.request;
  scratch.elements = request.count;
  const tcp::Tag tag = place.TagOf(Message::kData);
  if (request.has_planes) return ExchangePlanes(place, tag, generation, scratch);
  if (GoesInRows(request.kind, request.dtype, request.op)) return ExchangeRows(place, tag, generation, scratch);
  scratch.out = scratch.data;
  if (!HasRanks(host_, generation)) return;  // there is nobody to give it to
  if (request.kind == Kind::kBroadcast) return ExchangeCopy(place, tag, generation, headers, scratch);
  Members members;
  std::vector<Figures> measured;  // of the members
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (!HasRanks(h, generation)) continue;
    members.push_back(h);
    measured.push_back(headers[h].figures);
  }
  const size_t bytes = request.count * SizeOf(request.dtype);
  const Group group(mesh_, place.epoch, members);
  if (!Reduces(request.kind)) return;
  scratch.out = part.kept.HasLane() ? part.kept.Of(self_) : scratch.result.Get(Aligned(std::max<size_t>(bytes, 1)));
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

// A broadcast, to the hosts that have no giver: they are dealt to those that have one, each of which gives to its own.
void Link::ExchangeCopy(const Place& place, const tcp::Tag& tag, uint32_t generation,
                        const std::vector<Header>& headers, Scratch& scratch) {
  Members giving, taking;
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (GiverOn(h, place.request)) {
      giving.push_back(h);
    } else if (HasRanks(h, generation)) {
      taking.push_back(h);
    }
  }
  for (size_t g = 0; g < giving.size(); g++) {
    Members members{giving[g]};
    for (size_t t = g; t < taking.size(); t += giving.size()) members.push_back(taking[t]);
    if (members.size() == 1 || std::find(members.begin(), members.end(), host_) == members.end()) continue;
    KUNGFU_CHECK(HasRanks(giving[g], generation), "the host of a source rank has no ranks in generation ", generation);
    std::sort(members.begin(), members.end());
    const auto root = std::find(members.begin(), members.end(), giving[g]) - members.begin();
    std::vector<Figures> measured;
    for (const uint32_t h : members) measured.push_back(headers[h].figures);
    const size_t bytes = place.request.count * SizeOf(place.request.dtype);
    Broadcast(Group(mesh_, place.epoch, members), tag, SelectBroadcastShape(strategy_, measured, bytes),
              static_cast<uint32_t>(root), scratch.data, bytes);
  }
}

// All parts came with the headers.
void Link::ReduceSmall(const Place& place, uint32_t generation, const Members& members,
                       const std::vector<Header>& headers, Scratch& scratch) const {
  const Request& request = place.request;
  const size_t room = Aligned(kSmallBytes);
  char* const scaled = scratch.other.Get(members.size() * room);
  std::vector<const void*> parts;
  for (const uint32_t h : members) {
    const void* part = headers[h].part;
    if (request.op == KF_MEAN) {
      part = Scaled(request, generation, headers, h, headers[h].part, scaled + parts.size() * room);
    }
    parts.push_back(part);
  }
  Doubling::ReduceAlone(request.dtype, request.op == KF_MEAN ? KF_SUM : request.op, std::move(parts), scratch.out,
                        request.count);
}

// What a host has brought to a mean, in `scaled` or where it was. It counts by what its ranks weigh; where nothing
// weighs anything, by their number, as on one host.
const void* Link::Scaled(const Request& request, uint32_t generation, const std::vector<Header>& headers, uint32_t host,
                         const char* part, char* scaled) const {
  const auto ranks = [&](uint32_t h) { return places_.SizeOf(h) - places_.DeadOn(h, generation, board_); };
  uint64_t all = 0, own = headers[host].weight;
  for (const Header& header : headers) all += header.weight;
  if (!request.weighted || all == 0) {
    own = ranks(host);
    all = 0;
    for (uint32_t h = 0; h < places_.hosts(); h++) all += ranks(h);
  }
  if (own == all) return part;
  if (own == 0) {  // who counts for nothing may bring anything, NaN included
    std::memset(scaled, 0, request.count * SizeOf(request.dtype));
    return scaled;
  }
  const double share = static_cast<double>(own) / static_cast<double>(all);
  const void* source = part;
  BlendFor(request.dtype)(scaled, &source, &share, 1, request.count);
  return scaled;
}

// Each host's rows to all others. The result are all ranks' rows, or their mean.
void Link::ExchangeRows(const Place& place, const tcp::Tag& tag, uint32_t generation, Scratch& scratch) {
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
  const auto bytes_of = [&](uint32_t h) { return row * (places_.SizeOf(h) - places_.DeadOn(h, generation, board_)); };
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

void Link::ExchangePlanes(const Place& place, const tcp::Tag& tag, uint32_t generation, Scratch& scratch) {
  scratch.out = scratch.data;
  if (!HasRanks(host_, generation)) return;
  const Request& request = place.request;
  const Planes& planes = scratch.planes;
  const size_t bytes = request.count * SizeOf(request.dtype);
  const PlaneSplit split = SplitPlanes(planes, places_);
  // This host's planes, where the whole's numbers have them.
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

// ---- what the host's ranks get

void Link::Give(const Name& name, const Request& request, const Verdict& verdict, const std::string& text,
                const Scratch& scratch) {
  const auto give = [&](Stage stage, const void* data, size_t bytes) {
    const kf_tensor tensor{data, nullptr, bytes};
    Operation operation{Kind::kBroadcast, name.name.c_str(), &tensor, 1, KF_UINT8, KF_SUM, self_};
    operation.part.stage = stage;
    operation.part.track = name.track;
    operation.part.signature = scratch.signature;
    local_->RunFrom(operation, 0);
  };
  VerdictAndResult word;
  word.verdict = verdict;
  const size_t bytes = BytesWithVerdictOf(request);
  if (bytes > 0 && verdict.what == Verdict::kDone) std::memcpy(word.result, scratch.out, bytes);
  give(Stage::kVerdict, &word, sizeof verdict + bytes);
  if (verdict.what != Verdict::kFailed) return;
  char field[kTextBytes] = {};
  CopyText(field, text);
  give(Stage::kText, field, sizeof field);
}

void Link::GiveResult(const Name& name, const Request& request, const Scratch& scratch) {
  if (request.kind == Kind::kBarrier || GiverOn(host_, request)) return;
  const kf_tensor tensor{scratch.out, nullptr, scratch.elements};
  Operation operation{Kind::kBroadcast, name.name.c_str(), &tensor, 1, request.dtype, KF_SUM, self_};
  operation.part.stage = Stage::kResult;
  operation.part.track = name.track;
  operation.part.signature = scratch.signature;
  operation.part.patient = request.is_slice;
  local_->RunFrom(operation, 0);
}

// ---- deaths

Members Link::LivingIn(uint32_t generation) const {
  Members living;
  for (uint32_t rank = 0; rank < places_.ranks(); rank++) living.push_back(rank);
  for (uint32_t d = 0; d < generation; d++) {
    living.erase(std::find(living.begin(), living.end(), board_.Death(d)));
  }
  return living;
}

// Until the board has so many; see 5.
void Link::AwaitDeaths(uint32_t deaths) const {
  while (board_.deaths() < deaths) Pause();
}

// How many of this host's are dead in a generation, once the segment knows of them.
uint32_t Link::AwaitLocalDeaths(uint32_t generation) const {
  AwaitDeaths(generation);
  const uint32_t dead = places_.DeadOn(host_, generation, board_);
  while (local_board_.deaths() < dead) Pause();
  return dead;
}

uint32_t Link::AwaitGenerationWithout(uint32_t host, uint32_t missing) const {
  for (;;) {
    if (const auto found = places_.GenerationWithout(host, missing, board_)) return *found;
    Pause();
  }
}

// A rank that is nobody's death, but an end that the others were not to go on without.
std::optional<uint32_t> Link::FinishedOn(uint32_t host) const {
  for (const uint32_t rank : places_.RanksOn(host)) {
    if (board_.EndedForAll(rank)) return rank;
  }
  return std::nullopt;
}

void Link::Pause() const {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (failed_) throw *failed_;
    if (closing_) throw Closed(KF_STALE, "this cluster version is over");
  }
  std::this_thread::sleep_for(kMoment);
}

}  // namespace kungfu::hosts
