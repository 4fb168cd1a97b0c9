// A link's threads, what it hears of its ranks, and its end.
//
// One thread, the dispatcher, reads requests and looks now and then at what nobody tells it: ranks that gave up, died
// or left, and what the other hosts say of their end. Operations run on threads that are made as they are needed and
// kept.
#include "collectives/hosts/link.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/hash.h"
#include "base/threads.h"
#include "collectives/hosts/link_state.h"

namespace kungfu::hosts {
namespace {

constexpr int kLookEveryMs = 20;
// The deadlines are the ranks'.
constexpr auto kNever = std::chrono::milliseconds(std::chrono::hours(24 * 3650));
const tcp::Tag kEnding = tcp::Tag::Of("kungfu/link/ending", 0);

}  // namespace

Link::Link(const std::shared_ptr<shm::Segment>& local, const std::shared_ptr<shm::Segment>& everybody, Places places,
           uint32_t host, std::vector<tcp::HostEnds> ends)
    : places_(std::move(places)),
      host_(host),
      self_(host < places_.hosts() ? places_.LinkOf(host) : 0),
      board_(everybody),
      local_board_(local, places_.RanksOn(host < places_.hosts() ? host : 0)),
      mesh_(host, kEpoch, std::move(ends), {kNever}),
      local_(std::make_unique<HostCommunicator>(local, self_, "", false, CommunicatorOptions{kNever, kNever, kNever},
                                                places_.RanksOn(host < places_.hosts() ? host : 0))),
      ends_(places_.hosts()),
      end_reasons_(places_.hosts()) {
  if (mesh_.size() != places_.hosts() || local->size() != self_ + 1 || everybody->size() != places_.ranks()) {
    throw Error(KF_INVALID, Text("host ", host, " of ", places_.hosts(), ": its segment of ", local->size(),
                                 " and connections to ", mesh_.size(), " hosts don't fit"));
  }
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = UINT64_MAX;
  try {
    if (epoll_ < 0 || wake_ < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0) throw SystemError("epoll");
    dispatcher_ = StartThread("kungfu-link", [this] { Serve(); });
  } catch (...) {
    close(epoll_);
    close(wake_);
    throw;
  }
}

Link::~Link() {
  Close();
  for (const auto& [_, fd] : heard_) close(fd);
  close(epoll_);
  close(wake_);
}

int Link::Connect(uint32_t local_rank) {
  if (local_rank >= self_) throw Error(KF_INVALID, Text("no rank ", local_rank, " of ", self_, " is on this host"));
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) throw SystemError("a socket to the link");
  const int room = 4 * static_cast<int>(Request::kMostBytes);
  setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
  fcntl(pair[0], F_SETFL, O_NONBLOCK);
  std::lock_guard<std::mutex> guard(mutex_);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = uint64_t{local_rank} << 32 | static_cast<uint32_t>(pair[0]);
  if (closing_ || epoll_ctl(epoll_, EPOLL_CTL_ADD, pair[0], &event) != 0) {
    const Error error = closing_ ? Error(KF_STALE, "this cluster version is over") : SystemError("epoll_ctl");
    close(pair[0]);
    close(pair[1]);
    throw error;
  }
  heard_.emplace_back(local_rank, pair[0]);
  return pair[1];
}

std::string Link::failure() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return failed_ ? failed_->what() : "";
}

void Link::Fail(kf_status status, const std::string& text) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (failed_ || closing_) return;
    failed_.emplace(status, text);
  }
  // First here: whoever waits in the segment, the link's own threads among them, is to find this reason and no other.
  local_board_.GiveUp(self_, GaveUp::kForAll, status, text);
  local_->Close(status, text);
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof one);  // the dispatcher tells the other hosts
}

void Link::Close() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (closing_) return;
    closing_ = true;
  }
  local_->Close(KF_STALE, "this cluster version is over");
  mesh_.Cancel(kEpoch + 1);
  changed_.notify_all();
  const uint64_t one = 1;
  (void)!write(wake_, &one, sizeof one);
  dispatcher_.join();
  std::vector<std::thread> workers;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    workers.swap(workers_);
  }
  for (std::thread& worker : workers) worker.join();
}

// ---- the dispatcher

// What is under way between the dispatchers of two hosts.
struct Link::Talk {
  Ending heard;
  std::vector<uint64_t> heard_names;
  tcp::Mesh::Ticket hearing, saying, saying_names;
  bool names_follow = false;
  bool lost = false;
};

void Link::Serve() {
  std::vector<Talk> talks(places_.hosts());
  Ending said;
  std::vector<uint64_t> said_names;
  bool says = false;
  try {
    for (uint32_t h = 0; h < places_.hosts(); h++) {
      if (h != host_) talks[h].hearing = mesh_.Receive(kEpoch, h, kEnding, &talks[h].heard, sizeof(Ending));
    }
  } catch (const Error& error) {
    Fail(error.status(), error.what());
  }
  for (;;) {
    epoll_event events[64];
    const int n = epoll_wait(epoll_, events, 64, kLookEveryMs);
    for (int i = 0; i < n; i++) {
      if (events[i].data.u64 == UINT64_MAX) {
        uint64_t count;
        (void)!read(wake_, &count, sizeof count);
        continue;
      }
      try {
        Hear(static_cast<uint32_t>(events[i].data.u64 >> 32), static_cast<int>(events[i].data.u64 & UINT32_MAX));
      } catch (const std::exception& error) {
        Fail(KF_INTERNAL, error.what());
      }
    }
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (closing_) return;
    }
    try {
      if (const auto given_up = local_board_.GaveUpForAll()) Fail(given_up->status(), given_up->what());
      HearEnds(talks);
      if (!says && LookForEnd(said, said_names)) {
        says = true;
        for (uint32_t h = 0; h < places_.hosts(); h++) {
          if (h == host_) continue;
          talks[h].saying = mesh_.Send(kEpoch, h, kEnding, &said, sizeof said);
          if (!said_names.empty()) {
            talks[h].saying_names =
                mesh_.Send(kEpoch, h, kEnding.Step(1), said_names.data(), said_names.size() * sizeof(uint64_t));
          }
        }
      }
    } catch (const Error& error) {
      Fail(error.status(), error.what());
    }
  }
}

// All that a process has written to its socket.
void Link::Hear(uint32_t local_rank, int fd) {
  thread_local std::vector<char> bytes(Request::kMostBytes);
  for (;;) {
    const ssize_t n = recv(fd, bytes.data(), bytes.size(), 0);
    if (n > 0) {
      auto request = Request::From(bytes.data(), static_cast<size_t>(n));
      const bool fits = request && (!request->has_planes || request->planes.of_rank.size() == places_.ranks()) &&
                        request->root < places_.ranks();
      if (fits) {
        Begin(local_rank, std::move(*request));
        continue;
      }
      Fail(KF_INTERNAL, Text(local_board_.PeerName(local_rank), " said something to its link that is no request"));
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return;
    }
    // It has ended, or is not to be listened to.
    std::lock_guard<std::mutex> guard(mutex_);
    epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
    heard_.erase(std::remove(heard_.begin(), heard_.end(), std::make_pair(local_rank, fd)), heard_.end());
    close(fd);
    return;
  }
}

void Link::Begin(uint32_t local_rank, Request request) {
  std::lock_guard<std::mutex> guard(mutex_);
  std::unique_ptr<Name>& entry = names_[request.name];
  if (entry == nullptr) {
    entry = std::make_unique<Name>();
    entry->name = request.name;
    entry->asked.resize(self_);
  }
  Name& name = *entry;
  if (request.renewal) {
    const auto key = std::make_pair(name.asked[local_rank], request.from_generation);
    name.renewals.emplace(key, std::move(request));
    changed_.notify_all();
    return;
  }
  // Whoever begins the k-th first says what it is; that all bring the same they find out by themselves.
  if (++name.asked[local_rank] <= name.begun + name.waiting.size()) return;
  name.waiting.push_back(std::move(request));
  if (name.runs) return;
  name.runs = true;
  ready_.push_back(&name);
  if (idle_ >= ready_.size()) {
    changed_.notify_all();
    return;
  }
  try {
    workers_.push_back(StartThread("kungfu-link-op", [this] { Work(); }));
  } catch (const std::exception&) {
    if (workers_.empty()) throw;
    changed_.notify_all();  // it waits for one of those that there are
  }
}

void Link::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    idle_++;
    changed_.wait(lock, [&] { return closing_ || !ready_.empty(); });
    idle_--;
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

// ---- the end

// What the other hosts say of theirs.
void Link::HearEnds(std::vector<Talk>& talks) {
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    Talk& talk = talks[h];
    if (h == host_ || talk.lost || !talk.hearing.IsDone() || HasEnded(h)) continue;
    try {
      mesh_.Wait(talk.hearing);
    } catch (const Error& error) {
      talk.lost = true;
      Fail(error.status(), error.what());
      continue;
    }
    Ending& heard = talk.heard;
    if (heard.what == Ending::kFailed) {
      Fail(static_cast<kf_status>(heard.status), TextOf(heard.text));
      continue;
    }
    constexpr uint64_t kMostNames = 1 << 24;
    if (heard.names > kMostNames) throw Error(KF_INTERNAL, Text("host ", mesh_.name(h), " has too many names"));
    if (heard.names > 0 && !talk.names_follow) {
      talk.names_follow = true;
      talk.heard_names.resize(2 * heard.names);
      talk.hearing = mesh_.Receive(kEpoch, h, kEnding.Step(1), talk.heard_names.data(),
                                   talk.heard_names.size() * sizeof(uint64_t));
      continue;
    }
    std::unordered_map<uint64_t, uint64_t> begun;
    for (size_t i = 0; i < talk.heard_names.size(); i += 2) begun[talk.heard_names[i]] = talk.heard_names[i + 1];
    std::lock_guard<std::mutex> guard(mutex_);
    ends_[h] = std::move(begun);
    if (heard.what == Ending::kLeft) end_reasons_[h] = TextOf(heard.text);
  }
}

bool Link::HasEnded(uint32_t host) const {
  std::lock_guard<std::mutex> guard(mutex_);
  return ends_[host].has_value();
}

// Whether there is something to be said of this host's end, and what. Requests that its ranks have written are heard
// first: a rank writes them before it leaves or dies, so what is in its socket when that is seen is all there will be.
bool Link::LookForEnd(Ending& ending, std::vector<uint64_t>& names) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (failed_) {
      ending.what = Ending::kFailed;
      ending.status = failed_->status();
      CopyText(ending.text, failed_->what());
      return true;
    }
  }
  std::string left;
  for (uint32_t r = 0; r < self_; r++) {
    if (local_board_.IsDead(r)) continue;
    if (local_board_.State(r) != RankState::kLeft) return false;
    left += Text(left.empty() ? "" : ", ", local_board_.PeerName(r));
  }
  std::vector<std::pair<uint32_t, int>> sockets;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    sockets = heard_;
  }
  for (const auto& [rank, fd] : sockets) Hear(rank, fd);
  std::lock_guard<std::mutex> guard(mutex_);
  for (const auto& [text, name] : names_) {
    names.push_back(Fnv1a(text.data(), text.size()));
    names.push_back(name->begun + name->waiting.size());
  }
  ending.what = left.empty() ? Ending::kDead : Ending::kLeft;
  ending.names = names.size() / 2;
  CopyText(ending.text, left + " has finished and left");
  return true;
}

// An operation's thread calls it while it waits for a host.
void Link::ThrowIfVoid(uint32_t host, const Name& name, uint64_t number) const {
  std::lock_guard<std::mutex> guard(mutex_);
  if (failed_) throw *failed_;
  if (!ends_[host]) return;
  const auto found = ends_[host]->find(Fnv1a(name.name.data(), name.name.size()));
  if (found != ends_[host]->end() && number <= found->second) return;
  if (!end_reasons_[host].empty()) {
    throw Error(KF_PEER_LOST,
                Text("\"", name.name, "\": ", end_reasons_[host], ", cluster version ", board_.cluster_version()));
  }
  throw VoidHost();
}

}  // namespace kungfu::hosts
