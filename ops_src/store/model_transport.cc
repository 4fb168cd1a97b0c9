#include "store/model_transport.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "base/memory.h"
#include "base/threads.h"

namespace kungfu::store {
namespace {

constexpr uint64_t kEpoch = 1;
// This transport has no deadline, because the requesting workers have deadlines.
constexpr auto kNever = std::chrono::milliseconds(std::chrono::hours(24 * 3650));
constexpr auto kMoment = std::chrono::milliseconds(10);
constexpr uint32_t kMostAnswering = 2;  // maximum number of a host's requests that are answered at the same time
constexpr size_t kMostWaiting = 4096;   // maximum number of queued requests to one host; rarely reached, because each
                                        // request needs a waiting thread
enum : uint64_t { kAsk = 0, kAnswer = 1, kTensors = 2 };  // the messages of one request

tcp::Tag TagOf(uint64_t number) { return tcp::Tag::Of("kungfu/models", number); }

template <size_t kSize>
bool IsText(const char (&field)[kSize]) {
  return std::memchr(field, 0, kSize) != nullptr;
}

bool IsAsk(const Ask& ask) {
  return ask.magic == Ask::kMagic && ask.kind <= Ask::kModel && IsText(ask.name) && IsText(ask.layout) &&
         (ask.kind == Ask::kModel || ask.padded == 0);
}

Answer Failure(kf_status status, const std::string& text) {
  Answer answer;
  answer.status = status;
  CopyText(answer.text, text);
  return answer;
}

Answer IsOver() { return Failure(KF_STALE, "this cluster version has ended"); }

// Rejects a request. If the worker can't receive the refusal, the worker waits until its deadline.
void Refuse(int socket, const Ask& ask, bool again, const std::string& text) {
  Refusal refusal;
  refusal.number = ask.number;
  refusal.again = again ? 1 : 0;
  CopyText(refusal.text, text);
  (void)!send(socket, &refusal, sizeof refusal, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Returns true if the error means that this process temporarily lacks resources.
bool IsScarce(int error) { return error == ENOMEM || error == ENOBUFS || error == EMFILE || error == ENFILE; }

}  // namespace

ModelTransport::ModelTransport(hosts::Places places, uint32_t host, std::vector<tcp::HostEnds> ends, Find find)
    : places_(std::move(places)),
      host_(host),
      find_(std::move(find)),
      mesh_(host, kEpoch, std::move(ends), {kNever}),
      hosts_(places_.hosts()) {
  if (mesh_.size() != places_.hosts()) {
    throw Error(KF_INVALID,
                Text("connections to ", mesh_.size(), " hosts, but the cluster has ", places_.hosts(), " hosts"));
  }
  epoll_.Add(wake_.fd(), static_cast<uint64_t>(wake_.fd()));
  dispatcher_ = StartThread("kungfu-models", [this] { Serve(); });
}

ModelTransport::~ModelTransport() { Close(); }

int ModelTransport::Connect() {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
    throw SystemError("socketpair for model requests");
  fcntl(pair[0], F_SETFL, O_NONBLOCK);
  std::lock_guard<std::mutex> guard(mutex_);
  try {
    if (closing_) throw Error(KF_STALE, "this cluster version has ended");
    epoll_.Add(pair[0], static_cast<uint64_t>(pair[0]));
  } catch (...) {
    close(pair[0]);
    close(pair[1]);
    throw;
  }
  workers_.insert(pair[0]);
  return pair[1];
}

void ModelTransport::LoseHost(uint32_t host) {
  if (host >= places_.hosts() || host == host_)
    throw Error(KF_INVALID, Text("host ", host, " isn't another host of this cluster"));
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (closing_ || hosts_[host].lost) return;
    hosts_[host].lost = true;
  }
  mesh_.LoseHost(host, "the job continues without it");
}

std::vector<std::pair<uint32_t, std::string>> ModelTransport::Unreachable() const {
  std::lock_guard<std::mutex> guard(mutex_);
  std::vector<std::pair<uint32_t, std::string>> found;
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (!hosts_[h].unreachable.empty() && !hosts_[h].lost) found.emplace_back(h, hosts_[h].unreachable);
  }
  return found;
}

void ModelTransport::Close() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (closing_) return;
    closing_ = true;
  }
  mesh_.Cancel(kEpoch + 1);
  changed_.notify_all();
  wake_.Set();
  dispatcher_.join();
  std::vector<std::thread> threads;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
  // All other threads have ended, and have answered the requests that they had begun. Answer the
  // queued requests here.
  for (Far& far : hosts_) {
    for (auto& waiting : far.waiting) {
      for (Asking& asking : waiting) {
        if (asking.parcel != nullptr) asking.parcel->Finish(IsOver());
      }
      waiting.clear();
    }
    far.hearing = {};
  }
  for (const int fd : workers_) close(fd);
  workers_.clear();
  jobs_.clear();
}

// ---- the dispatcher

void ModelTransport::Serve() {
  for (;;) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (closing_) return;
    }
    HearHosts();
    epoll_event events[64];
    const int n = epoll_.Wait(events, -1);
    for (int i = 0; i < n; i++) {
      const int fd = static_cast<int>(events[i].data.u64);
      if (fd == wake_.fd()) {
        wake_.Clear();
      } else {
        HearWorker(fd);
      }
    }
  }
}

// Receives all requests of a process. If a request's parcel can't be mapped, the process gets a
// refusal. If a message is invalid, the process is disconnected.
void ModelTransport::HearWorker(int socket) {
  for (;;) {
    Ask ask;
    int fd;
    const ssize_t n = ReceiveWith(socket, &ask, sizeof ask, fd);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n < 0 && IsScarce(errno)) {
      std::this_thread::sleep_for(kMoment);  // the socket stays readable, so the request is received later
      return;
    }
    std::unique_ptr<Parcel> parcel;
    const bool is_ask = n == sizeof ask && IsAsk(ask);
    if (is_ask && fd < 0) {
      // The kernel drops the message's descriptor if this process has reached its limit of
      // descriptors.
      Refuse(socket, ask, /*again=*/true,
             "the launcher received no descriptor with the request; raise the launcher's RLIMIT_NOFILE");
      continue;
    }
    try {
      if (is_ask) parcel = Parcel::Open(fd, ask.padded);
    } catch (const Error& error) {
      Refuse(socket, ask, /*again=*/error.status() != KF_INVALID, error.what());
    } catch (const std::exception& error) {
      Refuse(socket, ask, /*again=*/true, error.what());
    }
    if (fd >= 0) close(fd);
    if (is_ask && parcel == nullptr) continue;
    std::lock_guard<std::mutex> guard(mutex_);
    if (parcel == nullptr) {
      epoll_.Remove(socket);
      workers_.erase(socket);
      close(socket);
      return;
    }
    if (ask.rank >= places_.ranks() || places_.HostOf(ask.rank) == host_) {
      parcel->Finish(Failure(KF_INVALID, Text("rank ", ask.rank, " isn't on another host")));
      continue;
    }
    const uint32_t host = places_.HostOf(ask.rank);
    auto& waiting = hosts_[host].waiting[ask.padded > kSmallBytes ? 1 : 0];
    if (waiting.size() >= kMostWaiting) {
      parcel->Finish(Failure(KF_INTERNAL, Text("too many requests for models are queued; at most ", kMostWaiting)));
      continue;
    }
    waiting.push_back({ask, std::move(parcel)});
    Pump(host);
  }
}

// Receives the requests of the other hosts.
void ModelTransport::HearHosts() {
  for (uint32_t h = 0; h < places_.hosts(); h++) {
    if (h == host_) continue;
    std::lock_guard<std::mutex> guard(mutex_);
    Far& far = hosts_[h];
    Listen(h);
    while (far.listens && far.hearing.IsDone()) {
      far.listens = false;
      try {
        mesh_.Wait(far.hearing);
        const bool here = IsAsk(far.ask) && far.ask.rank < places_.ranks() && places_.HostOf(far.ask.rank) == host_;
        if (!here) throw Error(KF_PEER_LOST, Text("host ", mesh_.name(h), " sent an invalid request for a model"));
      } catch (const Error& error) {
        if (error.status() == KF_PEER_LOST) far.unreachable = error.what();
        far.over = true;
        break;
      }
      far.answering++;
      Do([this, h, ask = far.ask, number = far.heard++] { AnswerHost(h, ask, number); });
      Listen(h);
    }
  }
}

// Posts the receive for the host's next request. The caller must hold mutex_.
void ModelTransport::Listen(uint32_t host) {
  Far& far = hosts_[host];
  if (far.listens || far.over || far.answering >= kMostAnswering) return;
  far.hearing = mesh_.Receive(kEpoch, host, TagOf(far.heard).Step(kAsk), &far.ask, sizeof far.ask, wake_.fd());
  far.listens = true;
}

// Sends the next requests to a host, if the host can accept them. The caller must hold mutex_.
void ModelTransport::Pump(uint32_t host) {
  Far& far = hosts_[host];
  for (const int large : {0, 1}) {
    if (far.busy[large] || far.waiting[large].empty()) continue;
    far.busy[large] = true;
    auto asking = std::make_shared<Asking>(std::move(far.waiting[large].front()));
    far.waiting[large].pop_front();
    Do([this, host, large, asking, number = far.asked++] {
      AskHost(host, *asking, number);
      std::lock_guard<std::mutex> guard(mutex_);
      hosts_[host].busy[large] = false;
      if (!closing_) Pump(host);
    });
  }
}

// Runs the job on an idle thread or on a new thread. The caller must hold mutex_.
void ModelTransport::Do(std::function<void()> job) {
  jobs_.push_back(std::move(job));
  if (idle_ >= jobs_.size()) {
    changed_.notify_one();
    return;
  }
  try {
    threads_.push_back(StartThread("kungfu-model", [this] { Work(); }));
  } catch (const std::exception&) {
    changed_.notify_one();  // an existing thread runs the job, unless its worker's deadline passes first
  }
}

void ModelTransport::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    idle_++;
    changed_.wait(lock, [&] { return closing_ || !jobs_.empty(); });
    idle_--;
    if (jobs_.empty()) return;  // after Close, jobs end immediately, because the mesh is closed
    const auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

// ---- functions that run on the threads for requests

void ModelTransport::AskHost(uint32_t host, Asking& asking, uint64_t number) {
  const Ask& ask = asking.ask;
  Answer answer;
  try {
    const tcp::Tag tag = TagOf(number);
    const auto heard = mesh_.Receive(kEpoch, host, tag.Step(kAnswer), &answer, sizeof answer);
    const auto said = mesh_.Send(kEpoch, host, tag.Step(kAsk), &ask, sizeof ask);
    mesh_.Wait(said);
    mesh_.Wait(heard);
    if (!IsText(answer.layout) || !IsText(answer.text)) {
      throw Error(KF_INTERNAL, Text("host ", mesh_.name(host), " sent an invalid answer"));
    }
    if (answer.version > 0 && ask.padded > 0) {
      mesh_.Wait(mesh_.Receive(kEpoch, host, tag.Step(kTensors), asking.parcel->data(), ask.padded));
    }
  } catch (const Error& error) {
    // If a host is lost, its models are lost too.
    if (error.status() == KF_PEER_LOST) {
      answer = {};
    } else {
      answer = error.status() == KF_STALE ? IsOver() : Failure(error.status(), error.what());
    }
  } catch (const std::exception& error) {
    answer = Failure(KF_INTERNAL, error.what());
  }
  asking.parcel->Finish(answer);
}

void ModelTransport::AnswerHost(uint32_t host, const Ask& ask, uint64_t number) {
  const std::string name = TextOf(ask.name);
  Answer answer;
  Memory copy;
  char* tensors = nullptr;
  try {
    const auto view = ViewOf(ask.rank);
    if (view != nullptr && ask.kind == Ask::kDescription) {
      const Description described = view->Describe(name);
      CopyText(answer.layout, described.layout);
      answer.bytes = described.bytes;
      answer.version = described.version;
    } else if (view != nullptr) {
      answer.version = view->RequestPadded(name, TextOf(ask.layout), ask.bytes, ask.padded, [&] {
        return tensors = copy.Get(std::max<size_t>(Aligned(ask.padded), kAlign));
      });
    }
  } catch (const Error& error) {
    answer = Failure(error.status(), error.what());
  } catch (const std::exception& error) {
    answer = Failure(KF_INTERNAL, error.what());
  }
  try {
    const tcp::Tag tag = TagOf(number);
    const auto said = mesh_.Send(kEpoch, host, tag.Step(kAnswer), &answer, sizeof answer);
    mesh_.Wait(said);
    if (answer.version > 0 && ask.padded > 0) {
      mesh_.Wait(mesh_.Send(kEpoch, host, tag.Step(kTensors), tensors, ask.padded));
    }
  } catch (const std::exception&) {
    // The requesting host is lost, or this cluster version has ended. `Listen` detects both.
  }
  std::lock_guard<std::mutex> guard(mutex_);
  hosts_[host].answering--;
  if (!closing_) wake_.Set();  // the host's next request can be received now
}

// Returns null if the rank has saved nothing yet, or if its process has ended.
std::shared_ptr<StoreView> ModelTransport::ViewOf(uint32_t rank) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = views_.find(rank);
    if (found != views_.end() && found->second->OwnerLives()) return found->second;
    if (found != views_.end()) views_.erase(found);
  }
  auto view = find_(rank);  // called without the lock, because it calls Python
  if (view == nullptr || !view->OwnerLives()) return nullptr;
  std::lock_guard<std::mutex> guard(mutex_);
  views_[rank] = view;
  return view;
}

}  // namespace kungfu::store
