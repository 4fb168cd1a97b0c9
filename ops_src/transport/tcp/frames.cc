// Frames: how this host composes a frame, and how it handles a received frame.
//
// 1. Epochs. A host raises its epoch for all its connections at once. Everything that it then
// writes to a connection belongs to the new epoch, except the rest of a frame that had already
// begun. So on one connection epochs never decrease:
// - A frame of an older epoch than this host's epoch is read and dropped, because its content is
//   void.
// - After a frame of a newer epoch, the connection has no more data for this host's current epoch.
//   So this host reads no more from the connection until the newer epoch begins here too. It still
//   reads its other connections, because these may have data for the current epoch.
// Test: Mesh.AfterCancelNoBufferIsTouchedAndNoOldMessageArrives
//
// If a sender closes a connection that is held back, this host detects the close when the last
// bytes fit into its buffers. At the latest, it detects the close in the new epoch, which begins on
// all hosts after any host has detected the close. If a host stays in an old epoch, Cancel, a loss
// or a deadline ends its waits.
//
// 2. Lengths. Each frame states the length of the whole message. This host compares this length
// with the length of the posted message before it writes any byte. `begun` grows with every frame
// of the message, and never exceeds the message's length. So no frame is written past the end, and
// the message is complete when all its bytes have arrived. (Two frames might cover the same bytes
// and leave out other bytes. Only a faulty sender does this, and such a sender could send wrong
// data in any case.) A message that isn't posted must be small and within the credit. Both sides
// compute the credit in the same way: the bytes of the message plus a fixed amount for its record.
// A sender that exceeds the credit is declared lost.
// Test: Mesh.UnreceivedSmallMessagesAreBoundedAndDelayNoOther
// Test: MeshLoss.AHostThatEndsAtAnyByteIsNamedAndTheOthersGoOn
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "base/race_detector.h"
#include "transport/tcp/mesh.h"

namespace kungfu::tcp {
namespace {

// The maximum number of consecutive calls for one connection before the other connections are
// served.
constexpr int kTurns = 4;

[[noreturn]] void Refuse(const std::string& what) { throw Error(KF_PEER_LOST, what); }

void CheckForm(const FrameHeader& header) {
  if (header.magic != FrameHeader::kMagic) Refuse(Text("it sent a frame with magic number ", header.magic));
  if (header.kind < FrameKind::kData || header.kind > FrameKind::kTaken || header.reserved != 0) {
    Refuse(Text("it sent a frame of unknown kind ", static_cast<uint32_t>(header.kind)));
  }
  const bool data = header.kind == FrameKind::kData;
  const bool fits = data
                        ? header.length <= kFrameBytes && header.offset <= header.total &&
                              header.length <= header.total - header.offset && (header.length > 0) == (header.total > 0)
                        : header.length == 0 && header.offset == 0;
  if (!fits) {
    Refuse(Text("it sent an invalid frame: ", header.length, " bytes at ", header.offset, " of ", header.total));
  }
}

void CheckTotal(uint64_t total, uint64_t expected) {
  if (total != expected) Refuse(Text("it sent a message of ", total, " bytes where ", expected, " are expected"));
}

}  // namespace

// ---- out

// Makes a system call that may use a caller's memory, without holding the mutex (see Quiet).
// Compute the system call's arguments only after the wait for `released_`.
template <typename Call>
SocketResult Mesh::Unlocked(Lock& lock, const Call& call) {
  struct Busy {
    Busy(Mesh& of, Lock& held) : mesh(of), lock(held) {
      mesh.busy_++;
      lock.unlock();
    }
    ~Busy() {  // also if there is no memory for a TLS record
      lock.lock();
      mesh.busy_--;
      if (mesh.holds_ > 0) mesh.quiet_.notify_all();
    }
    Mesh& mesh;
    Lock& lock;
  };
  const Busy busy(*this, lock);
  return call();
}

// Returns true if more data can be written immediately. Returns false if another thread is writing to
// the connection, because that thread then writes all the data.
bool Mesh::Write(Lock& lock, Connection& connection) {
  for (int turn = 0; turn < kTurns; turn++) {
    released_.wait(lock, [&] { return holds_ == 0; });
    if (!connection.IsOpen() || connection.blocked || connection.writing) return false;
    if (connection.out.Idle() && !connection.Holds() && !Compose(connection)) return false;
    iovec parts[2];
    const size_t n = connection.out.Parts(parts);
    struct Writing {
      explicit Writing(Connection& of) : connection(of) { connection.writing = true; }
      ~Writing() { connection.writing = false; }
      Connection& connection;
    };
    std::optional<Writing> writing(connection);
    // In an in-place operation, another thread may soon receive the result into this memory, but
    // only after the other host has received this data. ThreadSanitizer doesn't see this order,
    // because it reports the read only after the system call.
    for (size_t p = 0; p < n; p++) ReportRead(parts[p].iov_base, parts[p].iov_len);
    const SocketResult result = Unlocked(lock, [&] {
      const UnreportedReads unreported;
      return connection.Write(parts, n);
    });
    writing.reset();
    // A close is detected when reading, because there may still be data to read.
    const bool ended = result.moved == Moved::kError && (result.error == EPIPE || result.error == ECONNRESET);
    if (result.moved == Moved::kError && !ended) Refuse(Text("can't write to it: ", std::strerror(result.error)));
    HaveWritten(connection, result.bytes);
  }
  return !connection.blocked;
}

// Chooses the data to write next: all waiting frames without a payload, and one frame with a
// payload. Small messages come first. The credit limits their amount, so other messages aren't
// delayed forever.
bool Mesh::Compose(Connection& connection) {
  Host& host = hosts_[connection.host];
  Outgoing& out = connection.out;
  const auto add = [&](FrameHeader header) {
    header.epoch = epoch_;
    header.taken = host.told = host.taken;
    out.heads.push_back(header);
  };
  while (!host.control.empty() && out.heads.size() + 1 < Outgoing::kMostHeads) {
    add(host.control.front());
    host.control.pop_front();
  }
  auto& queue = host.small.empty() ? host.granted : host.small;
  if (!queue.empty()) {
    Transfer& transfer = *queue.front();
    FrameHeader header;
    header.kind = FrameKind::kData;
    header.tag = transfer.tag;
    header.offset = transfer.begun;
    header.total = transfer.total;
    header.length = static_cast<uint32_t>(std::min(kFrameBytes, transfer.total - transfer.begun));
    add(header);
    out.source = queue.front();
    out.payload = transfer.from + transfer.begun;
    out.payload_bytes = header.length;
    transfer.begun += header.length;
    if (transfer.begun == transfer.total) queue.pop_front();
  }
  return !out.Idle();
}

void Mesh::HaveWritten(Connection& connection, size_t bytes) {
  Outgoing& out = connection.out;
  hosts_[connection.host].counted.sent += bytes;
  out.written += bytes;
  if (out.written < out.Bytes() || connection.Holds()) {
    connection.blocked = true;
    Listen(connection);
  }
  if (out.written < out.Bytes()) return;
  const TransferPtr source = std::move(out.source);
  const size_t payload_bytes = out.payload_bytes;
  out.Clear();
  if (source == nullptr) return;
  source->moved += payload_bytes;
  if (source->moved < source->total) return;
  source->End(KF_OK, "");
  Stir();
}

// ---- in

void Mesh::Read(Lock& lock, Connection& connection) {
  Host& host = hosts_[connection.host];
  Incoming& in = connection.in;
  for (int turn = 0; turn < kTurns; turn++) {
    released_.wait(lock, [&] { return holds_ == 0; });
    if (!connection.IsOpen() || in.held) return;
    iovec parts[2];
    size_t n = 0, asked = 0, direct = 0;
    if (in.in_payload) {  // `ahead` is empty in this case
      direct = in.to != nullptr ? in.left : std::min(in.left, sink_.size());
      parts[n++] = {in.to != nullptr ? in.to : sink_.data(), direct};
      asked = direct;
    }
    if (direct == in.left) {
      parts[n++] = {in.ahead + in.end, Incoming::kAhead - in.end};
      asked += Incoming::kAhead - in.end;
    }
    const SocketResult result = Unlocked(lock, [&] { return connection.Read(parts, n); });
    switch (result.moved) {
      case Moved::kNothing:
        return;
      case Moved::kEnd:
        HaveEnd(lock, connection, "it closed its connection");
        return;
      case Moved::kError:
        HaveEnd(lock, connection, Text("its connection failed (", std::strerror(result.error), ")"));
        return;
      case Moved::kSome:
        break;
    }
    host.counted.received += result.bytes;
    const size_t got = std::min(direct, result.bytes);
    in.end += result.bytes - got;
    if (got > 0) {
      in.left -= got;
      if (in.to != nullptr) in.to += got;
      if (in.left == 0) Finish(host, in);
    }
    Parse(connection);
    if (result.bytes < asked) return;
  }
}

// Parses the bytes in `ahead`.
void Mesh::Parse(Connection& connection) {
  Incoming& in = connection.in;
  while (!in.held && in.begin < in.end) {
    const size_t there = in.end - in.begin;
    if (in.in_payload) {
      const size_t n = std::min(in.left, there);
      if (in.to != nullptr) {
        std::memcpy(in.to, in.ahead + in.begin, n);
        in.to += n;
      }
      in.begin += n;
      in.left -= n;
      if (in.left == 0) Finish(hosts_[connection.host], in);
    } else if (there >= sizeof in.header) {
      std::memcpy(&in.header, in.ahead + in.begin, sizeof in.header);
      in.begin += sizeof in.header;
      Begin(connection);
    } else {
      break;
    }
  }
  std::memmove(in.ahead, in.ahead + in.begin, in.end - in.begin);
  in.end -= in.begin;
  in.begin = 0;
}

// Handles a header that has arrived.
void Mesh::Begin(Connection& connection) {
  Host& host = hosts_[connection.host];
  Incoming& in = connection.in;
  const FrameHeader& header = in.header;
  CheckForm(header);
  if (header.epoch > epoch_) {
    in.held = true;
    Listen(connection);
    return;
  }
  in.Detach();
  in.left = header.length;
  in.in_payload = header.length > 0;
  if (header.epoch < epoch_) return;
  if (header.taken > host.sent)
    Refuse(Text("it reports ", header.taken, " bytes as taken, but only ", host.sent, " were sent"));
  host.sent_taken = std::max(host.sent_taken, header.taken);
  switch (header.kind) {
    case FrameKind::kData:
      BeginData(host, in);
      break;
    case FrameKind::kReady:
      HaveReady(host, header);
      break;
    case FrameKind::kOffer:
      HaveOffer(host, header);
      break;
    case FrameKind::kTaken:
      break;
  }
}

void Mesh::BeginData(Host& host, Incoming& in) {
  const FrameHeader& header = in.header;
  const auto found = host.inbound.find(header.tag);
  const bool unposted = found == host.inbound.end();
  if (unposted || !found->second.asked) {  // the message must be a single frame, and counts against the credit
    if (header.length != header.total || header.total > kUnaskedBytes) {
      Refuse(Text("it sent a message of ", header.total, " bytes that was not requested"));
    }
    host.come += UnaskedCharge(header.total);
    if (host.come - host.taken > kUnaskedCredit) Refuse("it sent more than this host can keep");
  }
  // Changes the table only after the checks: until the host is lost, another thread may handle a frame
  // with the same tag on another connection.
  Inbound& inbound = unposted ? host.inbound[header.tag] : found->second;
  if (unposted) {
    inbound.state = Inbound::State::kArriving;
    inbound.total = header.total;
    in.keeping = true;
    in.kept.resize(header.length);
    in.to = in.kept.data();
  } else if (inbound.state == Inbound::State::kPosted) {
    Transfer& transfer = *inbound.posted;
    CheckTotal(header.total, transfer.total);
    if (header.length > transfer.total - transfer.begun) Refuse("it sent a message twice");
    if (!inbound.asked) Take(host, header.total);
    transfer.begun += header.length;
    in.target = inbound.posted;
    in.to = transfer.to + header.offset;
  } else if (inbound.state == Inbound::State::kGone) {
    if (!inbound.asked) Take(host, header.total);
  } else {
    Refuse("it sent a message twice");
  }
  if (header.length == 0) Finish(host, in);
}

// Handles a payload that has arrived completely.
void Mesh::Finish(Host& host, Incoming& in) {
  in.in_payload = false;
  const TransferPtr target = std::move(in.target);
  if (target != nullptr) {
    target->moved += in.header.length;
    if (target->moved < target->total) return;
    host.inbound.erase(in.header.tag);
    target->End(KF_OK, "");
    Stir();
  } else if (in.keeping) {
    const auto at = host.inbound.find(in.header.tag);
    Inbound& inbound = at->second;
    if (inbound.state == Inbound::State::kGone) {  // the message has since been posted and withdrawn
      Take(host, inbound.total);
    } else if (inbound.posted == nullptr) {
      inbound.state = Inbound::State::kKept;
      inbound.kept = std::move(in.kept);
    } else {
      const TransferPtr posted = std::move(inbound.posted);
      if (!in.kept.empty()) std::memcpy(posted->to, in.kept.data(), in.kept.size());
      host.inbound.erase(at);
      Take(host, posted->total);
      posted->End(KF_OK, "");
      Stir();
    }
  }
  in.Detach();
}

void Mesh::HaveReady(Host& host, const FrameHeader& header) {
  const auto at = host.outbound.find(header.tag);
  if (at == host.outbound.end()) {
    if (++host.early > kMostEarly) Refuse(Text("it asked for ", host.early, " messages in advance"));
    host.outbound[header.tag].total = header.total;
    return;
  }
  Outbound& outbound = at->second;
  if (outbound.waiting == nullptr) Refuse("it asked for a message twice");
  if (header.total != outbound.total) {
    Refuse(Text("it asked for ", header.total, " bytes of a message of ", outbound.total, " bytes"));
  }
  host.granted.push_back(std::move(outbound.waiting));
  host.outbound.erase(at);
  Wake();
}

void Mesh::HaveOffer(Host& host, const FrameHeader& header) {
  if (header.total > kUnaskedBytes)
    Refuse(Text("it offered ", header.total, " bytes; at most ", kUnaskedBytes, " can be offered"));
  const auto at = host.inbound.find(header.tag);
  if (at == host.inbound.end()) {
    if (++host.early > kMostEarly) Refuse(Text("it offered ", host.early, " messages in advance"));
    Inbound& offered = host.inbound[header.tag];
    offered.state = Inbound::State::kOffered;
    offered.total = header.total;
    return;
  }
  Inbound& inbound = at->second;
  if (inbound.state == Inbound::State::kGone) return;
  if (inbound.state != Inbound::State::kPosted || inbound.asked || inbound.posted->begun > 0) {
    Refuse("it offered a message twice");
  }
  CheckTotal(header.total, inbound.total);
  Ask(host, inbound);
}

}  // namespace kungfu::tcp
