// A transport's threads, the requests of its ranks, and its shutdown.
//
// Operations run on threads that are created when they are needed and then kept. When such a thread
// has no more operations to run, it reads requests (Listen), unless another thread already does. If
// no thread listens, the dispatcher reads requests. The dispatcher is a thread that also checks
// whether ranks have called GiveUp, failed or left, and whether other hosts' ranks have ended.
#include "collectives/hosts/transport.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/fault_point.h"
#include "base/hash.h"
#include "base/threads.h"
#include "collectives/hosts/transport_state.h"

namespace kungfu::hosts {
namespace {

constexpr int kLookEveryMs = 20;
// A transport has no deadlines, because the ranks have deadlines.
constexpr auto kNever = std::chrono::milliseconds(std::chrono::hours(24 * 3650));
const tcp::Tag kEnding = tcp::Tag::Of("kungfu/hosts/ending", 0);
// The numbers of the messages between dispatchers. For each of these messages, a second message
// with the next number contains the names.
enum : uint64_t { kBegin = 0, kEnd = 2, kFailure = 4 };

}  // namespace

Transport::Transport(const std::shared_ptr<shm::Segment>& local, const std::shared_ptr<shm::Segment>& control_segment,
                     Places places, uint32_t host, std::vector<tcp::HostEnds> ends, Strategy strategy)
    : places_(std::move(places)),
      host_(host),
      self_(host < places_.hosts() ? places_.TransportOf(host) : 0),
      strategy_(strategy),
      control_(control_segment),
      local_control_(local, places_.RanksOn(host < places_.hosts() ? host : 0)),
      mesh_(host, kFirstEpoch, std::move(ends), {kNever}),
      meter_([this] { return mesh_.Measure(); }),
      local_(std::make_unique<HostCommunicator>(local, self_, "", false,
                                                CommunicatorOptions{kNever, kNever, kNever, false},
                                                places_.RanksOn(host < places_.hosts() ? host : 0))),
      scratches_(std::make_unique<ScratchPool>()),
      epoch_(kFirstEpoch),
      lost_(places_.hosts()),
      unreachable_(places_.hosts()),
      ends_(places_.hosts()),
      end_reasons_(places_.hosts()),
      given_(places_.hosts()) {
  if (mesh_.size() != places_.hosts() || local->size() != self_ + 1 || control_segment->size() != places_.ranks()) {
    throw Error(KF_INVALID, Text("host ", host, " of ", places_.hosts(), ": its segment of ", local->size(),
                                 " members does not match its connections to ", mesh_.size(), " hosts"));
  }
  epoll_.Add(wake_.fd(), kWake);
  epoll_.Add(requests_.fd(), kRequests);
  requests_.Add(call_.fd(), kWake);
  dispatcher_ = StartThread("kungfu-hosts", [this] { Serve(); });
}

Transport::~Transport() {
  Close();
  for (const auto& [_, fd] : heard_) close(fd);
}

int Transport::Connect(uint32_t local_rank) {
  if (local_rank >= self_)
    throw Error(KF_INVALID, Text("rank ", local_rank, " is not one of the ", self_, " ranks of this host"));
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) throw SystemError("a socket to the transport");
  const int room = 4 * static_cast<int>(Request::kMostBytes);
  setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
  fcntl(pair[0], F_SETFL, O_NONBLOCK);
  std::lock_guard<std::mutex> guard(mutex_);
  try {
    if (closing_) throw Error(KF_STALE, "this cluster version has ended");
    requests_.Add(pair[0], uint64_t{local_rank} << 32 | static_cast<uint32_t>(pair[0]));
  } catch (...) {
    close(pair[0]);
    close(pair[1]);
    throw;
  }
  heard_.emplace_back(local_rank, pair[0]);
  return pair[1];
}

std::string Transport::failure() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return failed_ ? failed_->what() : "";
}

size_t Transport::idle_bytes() const { return scratches_->idle_bytes(); }

std::vector<std::pair<uint32_t, std::string>> Transport::Unreachable() const {
  std::lock_guard<std::mutex> guard(mutex_);
  std::vector<std::pair<uint32_t, std::string>> found;
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (!unreachable_[h].empty() && !lost_[h]) found.emplace_back(h, unreachable_[h]);
  }
  return found;
}

// First cancels all messages between hosts, so running exchanges end without effect. Their threads
// then wait for the new epoch.
void Transport::LoseHost(uint32_t host) {
  if (host >= places_.hosts() || host == host_)
    throw Error(KF_INVALID, Text("host ", host, " is not another host of this cluster"));
  const std::lock_guard<std::mutex> one(losing_);
  uint64_t next;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (closing_ || failed_ || lost_[host]) return;
    next = epoch_ + 1;
  }
  mesh_.Cancel(next);
  KUNGFU_FAULT_POINT("before a new epoch");
  {
    std::lock_guard<std::mutex> guard(mutex_);
    lost_[host] = true;
    epoch_ = next;
    std::fill(given_.begin(), given_.end(), std::nullopt);
  }
  changed_.notify_all();
  wake_.Set();
}

// Only the first call writes the error to the segment, where the ranks read it. A failed operation
// closes `local_` without notifying a rank, and then calls this function.
void Transport::Fail(kf_status status, const std::string& text) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (failed_ || closing_) return;
    failed_.emplace(status, text);
  }
  // Write the error to the segment before `local_` is closed. All threads that wait in the segment,
  // including the transport's own threads, must find this error and no other error.
  local_control_.GiveUp(self_, GaveUp::kForAll, status, text);
  local_->Close(status, text);
  changed_.notify_all();
  wake_.Set();  // the dispatcher notifies the other hosts
}

void Transport::Close() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (closing_) return;
    closing_ = true;
  }
  local_->Close(KF_STALE, "this cluster version has ended");
  {
    const std::lock_guard<std::mutex> one(losing_);
    mesh_.Cancel(Epoch() + 1);
  }
  changed_.notify_all();
  begins_.notify_all();
  call_.Set();
  wake_.Set();
  dispatcher_.join();
  std::vector<std::thread> workers;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    workers.swap(workers_);
  }
  for (std::thread& worker : workers) worker.join();
}

// ---- the dispatcher

// The messages between this host's dispatcher and another host's dispatcher, in one epoch.
struct Transport::Talk {
  struct Hearing {
    Ending ending;
    std::vector<uint64_t> names;
    tcp::Mesh::Ticket ticket;
    bool names_follow = false;
    bool over = false;
  };
  // The messages that the other host sends at the beginning of the epoch (except the first epoch),
  // when its ranks have ended, and when its transport fails.
  Hearing begin, end, failure;
  std::vector<tcp::Mesh::Ticket> saying;
};

void Transport::Serve() {
  std::vector<Talk> talks;
  uint64_t epoch = 0;
  bool says_end = false, says_failure = false;  // what this host has already sent in this epoch
  for (;;) {
    epoll_event events[2];
    const int n = epoch == 0 ? 0 : epoll_.Wait(events, kLookEveryMs);
    for (int i = 0; i < n; i++) {
      if (events[i].data.u64 == kWake) {
        wake_.Clear();
      } else {
        HearRequests(0);
      }
    }
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (closing_) return;
    }
    try {
      if (const auto given_up = local_control_.GaveUpForAll()) Fail(given_up->status(), given_up->what());
      if (const uint64_t now = Epoch(); now != epoch) {
        epoch = now;
        says_end = says_failure = false;
        BeginTalks(talks, epoch);
      }
      HearEnds(talks, epoch);
      Ending ending;
      if (!says_failure && HasFailed(ending)) {
        says_failure = says_end = true;
        Say(talks, ending, epoch, kFailure);
      } else if (!says_end && IsOver(ending)) {
        says_end = true;
        Say(talks, ending, epoch, kEnd);
      }
    } catch (const Error& error) {
      if (Epoch() == epoch) Fail(error.status(), error.what());
    } catch (const std::exception& error) {
      Fail(KF_INTERNAL, OwnTrouble(error));
    }
  }
}

std::string Transport::OwnTrouble(const std::exception& error) const {
  return Text("inter-host transport of host ", mesh_.name(host_), ": failed: ", error.what());
}

void Transport::BeginTalks(std::vector<Talk>& talks, uint64_t epoch) {
  talks.clear();
  talks.resize(places_.hosts());
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (h == host_ || IsLost(h)) continue;
    Talk& talk = talks[h];
    talk.end.ticket = mesh_.Receive(epoch, h, kEnding.Step(kEnd), &talk.end.ending, sizeof(Ending));
    talk.failure.ticket = mesh_.Receive(epoch, h, kEnding.Step(kFailure), &talk.failure.ending, sizeof(Ending));
    talk.begin.over = epoch == kFirstEpoch;
    if (!talk.begin.over) {
      talk.begin.ticket = mesh_.Receive(epoch, h, kEnding.Step(kBegin), &talk.begin.ending, sizeof(Ending));
    }
  }
  if (epoch != kFirstEpoch) Say(talks, Ending(), epoch, kBegin);
}

// Sends `ending` to all other hosts, together with this host's numbers of operations.
void Transport::Say(std::vector<Talk>& talks, Ending ending, uint64_t epoch, uint64_t step) {
  // Keep the message in `said_`, because it may be in flight for a long time.
  auto& [said, names] = *said_.insert(said_.end(), {ending, {}});
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (const auto& [_, name] : names_) {
      names.insert(names.end(), {name->hash, name->begun + name->waiting.size(), name->given});
    }
  }
  if (ending.what == Ending::kFailed) names.clear();
  said.names = names.size() / 3;
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (h == host_ || IsLost(h)) continue;
    talks[h].saying.push_back(mesh_.Send(epoch, h, kEnding.Step(step), &said, sizeof said));
    if (names.empty()) continue;
    talks[h].saying.push_back(
        mesh_.Send(epoch, h, kEnding.Step(step + 1), names.data(), names.size() * sizeof(uint64_t)));
  }
}

bool Transport::IsLost(uint32_t host) const {
  std::lock_guard<std::mutex> guard(mutex_);
  return lost_[host];
}

// Waits for requests of any rank, and begins them.
void Transport::HearRequests(int wait_ms) {
  epoll_event events[64];
  const int n = requests_.Wait(events, wait_ms);
  for (int i = 0; i < n; i++) {
    if (events[i].data.u64 == kWake) continue;  // call_ ends the wait of the thread in Listen
    try {
      Hear(static_cast<uint32_t>(events[i].data.u64 >> 32), static_cast<int>(events[i].data.u64 & UINT32_MAX));
    } catch (const std::exception& error) {
      Fail(KF_INTERNAL, OwnTrouble(error));
    }
  }
}

// Reads all requests that a process has written to its socket.
void Transport::Hear(uint32_t local_rank, int fd) {
  const std::lock_guard<std::mutex> one(hearing_);
  {
    std::lock_guard<std::mutex> guard(mutex_);
    // Another thread may have closed the socket since it was reported.
    if (std::find(heard_.begin(), heard_.end(), std::make_pair(local_rank, fd)) == heard_.end()) return;
  }
  thread_local std::vector<char> bytes(Request::kMostBytes);
  for (;;) {
    const ssize_t n = recv(fd, bytes.data(), bytes.size(), 0);
    if (n > 0) {
      auto request = Request::From(bytes.data(), static_cast<size_t>(n));
      const bool fits = request && (!request->has_planes || request->planes.of_rank.size() == places_.ranks()) &&
                        request->root < places_.ranks() &&
                        std::all_of(
                            request->sources.begin(), request->sources.end(),
                            [&](uint32_t rank) { return rank < places_.ranks(); }) &&
                        request->count <= SIZE_MAX / 16 / std::max<size_t>(places_.ranks(), request->planes.count());
      if (fits && request->asks) {
        Answer(fd, *request);
        continue;
      }
      if (fits) {
        Begin(local_rank, std::move(*request));
        continue;
      }
      Fail(KF_INTERNAL,
           Text(local_control_.PeerName(local_rank), ": sent an invalid request to the inter-host transport"));
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    }
    // The process has exited, or has sent an invalid request.
    std::lock_guard<std::mutex> guard(mutex_);
    requests_.Remove(fd);
    heard_.erase(std::remove(heard_.begin(), heard_.end(), std::make_pair(local_rank, fd)), heard_.end());
    close(fd);
    return;
  }
}

// Replies to a rank that asks which hosts an operation is waiting for. Drops the reply if the rank
// doesn't read its socket.
void Transport::Answer(int fd, const Request& question) const {
  std::string text;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = names_.find(KeyOf(question.name, question.track));
    if (found != names_.end()) {
      // All operations wait for a host whose connection has ended, until the job's controller
      // declares the host lost.
      std::vector<uint32_t> unreachable;
      for (uint32_t h = 0; h < places_.hosts(); h++) {
        if (!unreachable_[h].empty() && !lost_[h] && !ends_[h]) unreachable.push_back(h);
      }
      for (const uint32_t host : unreachable.empty() ? found->second->awaited : unreachable) {
        std::string ranks;
        uint32_t living = 0;
        for (const uint32_t rank : places_.RanksOn(host)) {
          if (control_.HasFailed(rank)) continue;
          ranks += Text(living++ == 0 ? "" : ", ", rank);
        }
        text += Text(text.empty() ? "" : " and ", "host ", mesh_.name(host), " (rank", living == 1 ? " " : "s ", ranks,
                     ")");
      }
    }
  }
  std::vector<char> bytes(sizeof question.count + std::min(text.size(), kTextBytes));
  std::memcpy(bytes.data(), &question.count, sizeof question.count);
  std::memcpy(bytes.data() + sizeof question.count, text.data(), bytes.size() - sizeof question.count);
  (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Transport::Begin(uint32_t local_rank, Request request) {
  std::lock_guard<std::mutex> guard(mutex_);
  // If `begins_nothing_` is set, the rank was declared failed, but its process is still running.
  if (begins_nothing_ || closing_) return;
  const std::string key = KeyOf(request.name, request.track);
  std::unique_ptr<Name>& entry = names_[key];
  if (entry == nullptr) {
    entry = std::make_unique<Name>();
    entry->name = request.name;
    entry->track = request.track;
    entry->hash = Fnv1a(key.data(), key.size());
    entry->asked.resize(self_);
  }
  Name& name = *entry;
  if (request.renewal) {
    const auto key = std::make_pair(name.asked[local_rank], request.from_generation);
    name.renewals.emplace(key, std::move(request));
    changed_.notify_all();
    return;
  }
  // The first rank that begins the k-th operation defines the operation. The ranks themselves check
  // that all of them contribute the same operation.
  if (++name.asked[local_rank] <= name.begun + name.waiting.size()) return;
  name.waiting.push_back(std::move(request));
  if (name.runs) return;
  name.runs = true;
  ready_.push_back(&name);
  const uint32_t takes = listener_ == std::this_thread::get_id() ? 1 : 0;
  if (ready_.size() <= takes) return;
  if (idle_ + takes >= ready_.size()) {
    begins_.notify_one();
    return;
  }
  try {
    workers_.push_back(StartThread("kungfu-hosts-op", [this] { Work(); }));
  } catch (const std::exception&) {
    if (workers_.empty()) throw;
    begins_.notify_one();                             // the operation waits for one of the existing threads
    if (listener_ != std::thread::id()) call_.Set();  // only Listen clears it
  }
}

// Reads requests on a thread that can run the next operation itself, because a switch from the
// dispatcher to this thread takes much of a small operation's time. Meanwhile requests don't wake the
// dispatcher. A thread that runs an operation must not listen: the operation may wait for a rank that
// waits until its next request is read.
void Transport::Listen(std::unique_lock<std::mutex>& lock) {
  listener_ = std::this_thread::get_id();
  epoll_.Change(requests_.fd(), kRequests, 0);
  lock.unlock();
  HearRequests(-1);
  lock.lock();
  if (!closing_) call_.Clear();
  epoll_.Change(requests_.fd(), kRequests, EPOLLIN);
  listener_ = {};
}

void Transport::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    while (!closing_ && ready_.empty()) {
      if (listener_ == std::thread::id()) {
        Listen(lock);
      } else {
        idle_++;
        begins_.wait(lock);
        idle_--;
      }
    }
    if (closing_) return;
    Name& name = *ready_.front();
    ready_.pop_front();
    while (!name.waiting.empty() && !closing_) {
      const Request request = std::move(name.waiting.front());
      name.waiting.pop_front();
      const uint64_t number = ++name.begun;
      lock.unlock();
      Run(name, request, number);
      lock.lock();
      name.renewals.erase(name.renewals.begin(), name.renewals.lower_bound({number + 1, 0}));
    }
    name.runs = false;
  }
}

// ---- the end of the hosts' ranks

// Receives the other hosts' messages about their state.
void Transport::HearEnds(std::vector<Talk>& talks, uint64_t epoch) {
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (h == host_ || IsLost(h)) continue;
    for (Talk::Hearing* const hearing : {&talks[h].begin, &talks[h].end, &talks[h].failure}) {
      if (hearing->over || !hearing->ticket.IsDone()) continue;
      try {
        mesh_.Wait(hearing->ticket);
      } catch (const Error& error) {
        if (error.status() == KF_STALE) return;  // a new epoch has begun, or the transport closes
        hearing->over = true;
        {
          std::lock_guard<std::mutex> guard(mutex_);
          unreachable_[h] = error.what();
        }
        if (!control_.recovers()) Fail(error.status(), error.what());
        continue;
      }
      const Ending& ending = hearing->ending;
      if (ending.what == Ending::kFailed) {
        hearing->over = true;
        Fail(static_cast<kf_status>(ending.status), TextOf(ending.text));
        continue;
      }
      constexpr uint64_t kMostNames = 1 << 24;
      if (ending.names > kMostNames) throw Error(KF_INTERNAL, Text("host ", mesh_.name(h), " has too many names"));
      if (ending.names > 0 && !hearing->names_follow) {
        hearing->names_follow = true;
        hearing->names.resize(3 * ending.names);
        const uint64_t step = hearing == &talks[h].begin ? kBegin : kEnd;
        hearing->ticket = mesh_.Receive(epoch, h, kEnding.Step(step + 1), hearing->names.data(),
                                        hearing->names.size() * sizeof(uint64_t));
        continue;
      }
      hearing->over = true;
      std::lock_guard<std::mutex> guard(mutex_);
      if (epoch_ != epoch) return;
      std::unordered_map<uint64_t, uint64_t> begun, given;
      for (size_t i = 0; i < hearing->names.size(); i += 3) {
        begun[hearing->names[i]] = hearing->names[i + 1];
        given[hearing->names[i]] = hearing->names[i + 2];
      }
      if (hearing == &talks[h].begin) given_[h] = std::move(given);
      if (ending.what == Ending::kGoesOn) continue;
      ends_[h] = std::move(begun);
      if (ending.what == Ending::kLeft) end_reasons_[h] = TextOf(ending.text);
    }
  }
}

bool Transport::HasFailed(Ending& ending) const {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!failed_) return false;
  ending.what = Ending::kFailed;
  ending.status = failed_->status();
  CopyText(ending.text, failed_->what());
  return true;
}

// Returns true if this host begins no more operations, and sets the reason in `ending`. Before
// that, reads all pending requests. When the transport sees that a rank has left or failed, the
// rank's socket contains all requests of that rank.
bool Transport::IsOver(Ending& ending) {
  std::string left;
  for (uint32_t r = 0; r < self_; r++) {
    if (local_control_.HasFailed(r)) continue;
    const RankState state = local_control_.State(r);
    // EndedForAll means that the rank's process has exited successfully without a call of Leave.
    // The other ranks can't continue without this rank.
    if (state != RankState::kLeft && !local_control_.EndedForAll(r)) return false;
    left += Text(left.empty() ? "" : ", ", local_control_.PeerName(r), " ",
                 state == RankState::kLeft ? "has finished and left" : local_control_.LostReason(r));
  }
  std::vector<std::pair<uint32_t, int>> sockets;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    sockets = heard_;
  }
  for (const auto& [rank, fd] : sockets) Hear(rank, fd);
  {
    std::lock_guard<std::mutex> guard(mutex_);
    begins_nothing_ = true;
  }
  ending.what = left.empty() ? Ending::kNoRanks : Ending::kLeft;
  CopyText(ending.text, left);
  return true;
}

// Throws if `host` never joined the operation or has left it. An operation's thread calls this
// function before it waits for the host, and repeatedly during the wait.
void Transport::ThrowIfAbsent(uint32_t host, const Place& place) const {
  std::lock_guard<std::mutex> guard(mutex_);
  if (failed_) throw *failed_;
  if (lost_[host]) throw AbsentHost(/*has_given=*/false);
  const auto reaches = [&](const auto& numbers) {
    const auto found = numbers->find(place.name.hash);
    return found != numbers->end() && place.number <= found->second;
  };
  if (given_[host] && reaches(given_[host])) throw AbsentHost(/*has_given=*/true);
  if (!ends_[host] || reaches(ends_[host])) return;
  if (!end_reasons_[host].empty()) {
    throw HostLeft(KF_PEER_LOST, Text(NameOf(place.request.kind), " \"", place.name.name, "\": ", end_reasons_[host],
                                      ", cluster version ", control_.cluster_version()));
  }
  throw AbsentHost(/*has_given=*/false);
}

}  // namespace kungfu::hosts
