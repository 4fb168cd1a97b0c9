// The mesh's functions for callers: they post, await, withdraw and cancel messages.
//
// 1. Memory. A thread uses a caller's memory only while it holds the mutex, or during a system call.
// For such a call, a thread releases the mutex and counts itself in `busy_`. A thread that returns
// memory to its caller takes the mutex, waits until no thread is busy, and prevents other threads
// from making further calls (Quiet). Then no other thread uses the memory. The thread removes the
// message from all tables, from the data being written (Outgoing::Detach copies what a frame that has
// begun still needs), and from the data being read (Incoming::Detach drops the rest). After that
// nothing refers to the memory. All these system calls are non-blocking, so the wait takes at most one
// copy of 256 KiB. A message that ends normally is removed from all tables before its ticket reports
// the end.
// Test: Mesh.AWithdrawnMessagesMemoryIsFree
// Test: Mesh.AfterCancelNoBufferIsTouchedAndNoOldMessageArrives
//
// 2. No circular wait. Every connection is read, whatever the callers wait for (mesh_thread.cc). The
// only exception is a connection whose next frame belongs to a later epoch (see frames.cc). So a
// sender waits only for the network. There is always memory for received data: a posted message has
// its own memory, and an unsolicited message is covered by the credit. If a sender has no credit,
// it offers the message instead. The message is then sent when its Receive is posted, like a large
// message. So a message waits only for its own Receive.
// Test: Mesh.MessagesOfManyThreadsMeetInAnyOrder
// Test: Mesh.LateReceiverDelaysNoOther
//
// 3. Loss of a host. When a host is lost, the mesh ends the host's tickets and records the loss
// under the mutex. So later tickets find the host lost. The connections are closed, and nothing
// more is read from the host.
// Test: MeshLoss.AHostThatEndsAtAnyByteIsNamedAndTheOthersGoOn
#include "transport/tcp/mesh.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/run_time.h"
#include "base/threads.h"
#include "transport/tcp/socket.h"

namespace kungfu::tcp {
namespace {

constexpr size_t kSinkBytes = 64 << 10;

}  // namespace

Mesh::Quiet::Quiet(Mesh& mesh, Lock& lock) : mesh_(mesh) {
  mesh_.holds_++;
  mesh_.quiet_.wait(lock, [&] { return mesh_.busy_ == 0; });
}

Mesh::Quiet::~Quiet() {
  if (--mesh_.holds_ == 0) mesh_.released_.notify_all();
}

Mesh::Mesh(uint32_t self, uint64_t epoch, std::vector<HostEnds> hosts, MeshOptions options)
    : self_(self), options_(options), hosts_(Own(hosts)), epoch_(epoch), sink_(kSinkBytes) {
  if (self >= hosts_.size()) throw Error(KF_INVALID, Text("there is no host ", self, " among ", hosts_.size()));
  for (uint32_t h = 0; h < size(); h++) {
    const size_t n = hosts_[h].connections.size();
    if (h == self ? n > 0 : n < 1 || n > kMostConnections) {
      throw Error(KF_INVALID, Text("host ", self, " has ", n, " connections to host ", h, " (", name(h),
                                   "); it must have ", h == self ? 0 : 1, " to ", h == self ? 0 : kMostConnections));
    }
  }
  epoll_.Add(wake_.fd(), kWake);
  epoll_.Add(sockets_.fd(), kSockets);
  sockets_.Add(stir_.fd(), kWake);
  for (Host& host : hosts_) {
    for (auto& connection : host.connections) {
      Prepare(connection->fd);
      lends_ = lends_ && connection->tls == nullptr;
      connection->events = EPOLLIN | EPOLLRDHUP;
      sockets_.Add(connection->fd, connection->key(), connection->events);
    }
  }
  thread_ = StartThread("kungfu-mesh", [this] { Serve(); });
}

std::vector<Mesh::Host> Mesh::Own(std::vector<HostEnds>& ends) {
  std::vector<Host> hosts(ends.size());
  for (uint32_t h = 0; h < ends.size(); h++) {
    hosts[h].name = ends[h].name;
    for (const int fd : ends[h].connections) {
      const auto tls = ends[h].tls.find(fd);
      hosts[h].connections.push_back(
          std::make_unique<Connection>(fd, h, tls == ends[h].tls.end() ? nullptr : tls->second));
    }
  }
  return hosts;
}

Mesh::~Mesh() {
  if (process_.IsCopy()) {
    thread_.detach();  // the thread doesn't exist in this process
  } else {
    {
      Lock lock(mutex_);
      const Quiet quiet(*this, lock);
      for (Host& host : hosts_) EndAll(host, KF_STALE, "the connections between the hosts have been closed");
      stop_ = true;
      WakeThread();
    }
    thread_.join();
  }
}

Mesh::Ticket Mesh::Send(uint64_t epoch, uint32_t to, const Tag& tag, const void* data, size_t bytes) {
  process_.Refuse("send to other hosts");
  Ticket ticket;  // declared before the lock: if something throws, it is destroyed after the mutex is released
  Lock lock(mutex_);
  TransferPtr transfer = NewTransfer(epoch, to, tag, static_cast<const char*>(data), nullptr, bytes, -1);
  ticket = Ticket(this, transfer);
  if (transfer->IsDone()) return ticket;
  Host& host = hosts_[to];
  if (const auto found = host.outbound.find(tag); found != host.outbound.end()) {
    if (found->second.waiting != nullptr)
      throw Error(KF_INVALID, Text("a message with this tag is already being sent to ", host.name));
    if (const uint64_t total = found->second.total; total != bytes) {
      const Quiet quiet(*this, lock);
      Lose(host, Text("it asked for ", total, " bytes of a message of ", bytes));
      transfer->End(KF_PEER_LOST, host.lost);
      return ticket;
    }
    host.outbound.erase(found);
    host.early--;
    host.granted.push_back(std::move(transfer));
    Wake();
    return ticket;
  }
  if (bytes > kUnaskedBytes || host.sent - host.sent_taken + UnaskedCharge(bytes) > kUnaskedCredit) {
    host.outbound[tag] = {std::move(transfer), bytes};
    if (bytes <= kUnaskedBytes) Control(host, FrameKind::kOffer, tag, bytes);
    return ticket;
  }
  host.sent += UnaskedCharge(bytes);
  host.small.push_back(std::move(transfer));
  // Write on this thread if a connection is free, because a switch to the I/O thread would take
  // most of a small message's time.
  for (auto& connection : host.connections) {
    if (connection->IsOpen() && !connection->blocked && connection->out.Idle() && !host.small.empty()) {
      OrLose(lock, host, [&] { Write(lock, *connection); });
      break;
    }
  }
  if (host.HasWork()) Wake();
  return ticket;
}

Mesh::Ticket Mesh::Receive(uint64_t epoch, uint32_t from, const Tag& tag, void* data, size_t bytes, int tells) {
  process_.Refuse("receive from other hosts");
  Ticket ticket;  // declared before the lock, as in Send
  Lock lock(mutex_);
  TransferPtr transfer = NewTransfer(epoch, from, tag, nullptr, static_cast<char*>(data), bytes, tells);
  ticket = Ticket(this, transfer);
  if (transfer->IsDone()) return ticket;
  Host& host = hosts_[from];
  const auto [at, is_new] = host.inbound.try_emplace(tag);
  Inbound& inbound = at->second;
  if (is_new) {
    inbound.total = bytes;
    inbound.posted = std::move(transfer);
    if (bytes > kUnaskedBytes) Ask(host, inbound);
    return ticket;
  }
  if (inbound.posted != nullptr || inbound.state == Inbound::State::kGone) {
    throw Error(KF_INVALID, Text("a message with this tag is already being received from ", host.name));
  }
  if (const uint64_t total = inbound.total; total != bytes) {
    const Quiet quiet(*this, lock);
    Lose(host, Text("it sent a message of ", total, " bytes where ", bytes, " are expected"));
    transfer->End(KF_PEER_LOST, host.lost);
    return ticket;
  }
  inbound.posted = transfer;
  switch (inbound.state) {
    case Inbound::State::kPosted:
    case Inbound::State::kGone:
    case Inbound::State::kArriving:
      break;
    case Inbound::State::kOffered:
      inbound.state = Inbound::State::kPosted;
      host.early--;
      Ask(host, inbound);
      break;
    case Inbound::State::kKept:
      if (bytes > 0) std::memcpy(data, inbound.kept.data(), bytes);
      host.inbound.erase(at);
      Take(host, bytes);
      transfer->End(KF_OK, "");
      break;
  }
  return ticket;
}

void Mesh::Check(uint64_t epoch, uint32_t host) const {
  if (host >= size() || host == self_) {
    throw Error(KF_INVALID, Text("host ", self_, " of ", size(), " can't exchange messages with host ", host));
  }
  if (epoch > epoch_)
    throw Error(KF_INVALID, Text("the message has epoch ", epoch, ", but the mesh is in epoch ", epoch_));
}

// Returns a new transfer. If the epoch is over or the host is lost, the transfer has already ended
// with the corresponding error.
TransferPtr Mesh::NewTransfer(uint64_t epoch, uint32_t host, const Tag& tag, const char* from, char* to, size_t bytes,
                              int tells) {
  Check(epoch, host);
  if (tells >= 0) lends_ = false;
  auto transfer = std::make_shared<Transfer>(host, tag, from, to, bytes, tells);
  if (epoch < epoch_) {
    transfer->End(KF_STALE, Text("epoch ", epoch, " has ended; the hosts are in epoch ", epoch_));
  } else if (!hosts_[host].lost.empty()) {
    transfer->End(KF_PEER_LOST, hosts_[host].lost);
  }
  return transfer;
}

void Mesh::Wait(const Ticket& ticket) {
  process_.Refuse("wait for other hosts");
  KUNGFU_CHECK(ticket.transfer_ != nullptr, "the ticket has no message");
  Transfer& transfer = *ticket.transfer_;
  RunTime waited;
  while (!transfer.IsDone()) {
    InterruptCheck::Run();
    if (waited.Look() > options_.timeout) {
      throw Error(KF_TIMEOUT,
                  Text("a message of ", transfer.total, " bytes ", transfer.from != nullptr ? "to " : "from ",
                       name(transfer.host), " has not ended within ", options_.timeout.count() / 1000.0, " s"));
    }
    WaitSlice(transfer);
  }
  if (transfer.status != KF_OK) throw Error(transfer.status, transfer.error);
}

void Mesh::Withdraw(Transfer& transfer) noexcept {
  if (process_.IsCopy()) return;
  Lock lock(mutex_);
  const Quiet quiet(*this, lock);
  if (transfer.IsDone()) return;
  Host& host = hosts_[transfer.host];
  const auto is_it = [&](const TransferPtr& other) { return other.get() == &transfer; };
  if (const auto found = std::find_if(host.small.begin(), host.small.end(), is_it); found != host.small.end()) {
    // No part of the message has been sent, so the other side will never report it as taken.
    host.sent -= UnaskedCharge(transfer.total);
    host.small.erase(found);
  }
  host.granted.erase(std::remove_if(host.granted.begin(), host.granted.end(), is_it), host.granted.end());
  for (auto& connection : host.connections) {
    if (is_it(connection->out.source)) connection->out.Detach();
    if (is_it(connection->in.target)) connection->in.Detach();
  }
  if (const auto sent = host.outbound.find(transfer.tag); sent != host.outbound.end() && is_it(sent->second.waiting)) {
    host.outbound.erase(sent);
  }
  if (const auto found = host.inbound.find(transfer.tag); found != host.inbound.end() && is_it(found->second.posted)) {
    // The sender may still send the message, which must then be dropped.
    found->second.state = Inbound::State::kGone;
    found->second.posted = nullptr;
  }
  transfer.End(KF_ABORTED, "the message was withdrawn");
}

void Mesh::Cancel(uint64_t epoch) {
  process_.Refuse("cancel messages");
  Lock lock(mutex_);
  if (epoch <= epoch_) throw Error(KF_INVALID, Text("epoch ", epoch, " can't follow epoch ", epoch_));
  const Quiet quiet(*this, lock);
  if (epoch <= epoch_) throw Error(KF_INVALID, Text("epoch ", epoch, " can't follow epoch ", epoch_));
  for (Host& host : hosts_)
    EndAll(host, KF_STALE, Text("epoch ", epoch_, " has ended; the hosts continue in epoch ", epoch));
  epoch_ = epoch;
  renewed_ = true;
  WakeThread();
}

void Mesh::LoseHost(uint32_t host, const std::string& why) {
  process_.Refuse("lose a host");
  Lock lock(mutex_);
  Check(epoch_, host);
  const Quiet quiet(*this, lock);
  Lose(hosts_[host], why);
}

Mesh::Cable Mesh::Measure() {
  constexpr uint64_t kMuch = 256 << 10;
  const std::lock_guard<std::mutex> guard(mutex_);
  Cable cable;
  for (Host& host : hosts_) {
    if (host.counted.sent < host.measured + kMuch) continue;
    host.measured = host.counted.sent;
    for (const auto& connection : host.connections) {
      if (!connection->IsOpen()) continue;
      const Rate rate = RateOf(connection->fd);
      if (rate.acknowledged < connection->acknowledged + kMuch) continue;
      connection->acknowledged = rate.acknowledged;
      cable.bytes_per_ms += rate.bytes_per_s / 1000;
      cable.is_all = cable.is_all || !rate.is_least;
    }
  }
  return cable;
}

Mesh::Bytes Mesh::Counted(uint32_t host) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return hosts_[host].counted;
}

// Call it only while a Quiet lives.
void Mesh::EndAll(Host& host, kf_status status, const std::string& text) {
  Stir();
  std::vector<TransferPtr> all(host.small.begin(), host.small.end());
  all.insert(all.end(), host.granted.begin(), host.granted.end());
  for (const auto& [tag, inbound] : host.inbound) all.push_back(inbound.posted);
  for (const auto& [tag, outbound] : host.outbound) all.push_back(outbound.waiting);
  for (auto& connection : host.connections) {
    Outgoing& out = connection->out;
    all.push_back(out.source);
    all.push_back(connection->in.target);
    connection->in.Detach();
    // A frame that hasn't begun isn't needed any more. The rest of a frame that has begun must
    // always be written.
    if (out.written == 0 && out.rest.empty()) {
      out.Clear();
    } else {
      out.Detach();
    }
  }
  host.inbound.clear();
  host.outbound.clear();
  host.control.clear();
  host.small.clear();
  host.granted.clear();
  host.early = 0;
  host.sent = host.sent_taken = host.come = host.taken = host.told = 0;
  for (const TransferPtr& transfer : all) {
    if (transfer != nullptr) transfer->End(status, text);
  }
}

// Call it only while a Quiet lives.
void Mesh::Lose(Host& host, const std::string& why) {
  if (!host.lost.empty()) return;
  host.lost = Text("host ", host.name, " is lost: ", why);
  host.ending.reset();
  for (auto& connection : host.connections) Close(*connection);
  EndAll(host, KF_PEER_LOST, host.lost);
}

// Call it only while a Quiet lives.
void Mesh::Close(Connection& connection) {
  if (!connection.IsOpen()) return;
  sockets_.Remove(connection.fd);  // closing does this only if no forked child has a copy of the descriptor
  connection.Close();
}

// Makes a thread that is awake look for work, or wakes the I/O thread.
void Mesh::Wake() {
  news_ = true;
  if (driver_ != Driver::kAwake) WakeThread();
}

// Wakes the driver, so that it looks whether its message has ended.
void Mesh::Stir() {
  if (driver_ == Driver::kSleeps) stir_.Set();
}

void Mesh::WakeThread() {
  news_ = true;
  if (!std::exchange(sleeping_, false)) return;
  wake_.Set();
}

void Mesh::Control(Host& host, FrameKind kind, const Tag& tag, uint64_t total) {
  FrameHeader header;
  header.kind = kind;
  header.tag = tag;
  header.total = total;
  host.control.push_back(header);
  Wake();
}

void Mesh::Ask(Host& host, Inbound& inbound) {
  inbound.asked = true;
  Control(host, FrameKind::kReady, inbound.posted->tag, inbound.total);
}

// Gives the sender its credit back for an unsolicited message of `bytes` bytes. Every frame to the
// sender reports the returned credit. A separate frame is sent only if a quarter of the credit is
// unreported.
void Mesh::Take(Host& host, size_t bytes) {
  host.taken += UnaskedCharge(bytes);
  if (host.taken - host.told < kUnaskedCredit / 4) return;
  host.told = host.taken;
  Control(host, FrameKind::kTaken, Tag{}, 0);
}

}  // namespace kungfu::tcp
