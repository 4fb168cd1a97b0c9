// Messages between the hosts of a job, over TCP.
#ifndef KUNGFU_TRANSPORT_TCP_MESH_H_
#define KUNGFU_TRANSPORT_TCP_MESH_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/forks.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/socket.h"

namespace kungfu::tcp {

struct MeshOptions {
  std::chrono::milliseconds timeout{600000};  // of a Wait
};

// One host, as the others reach it.
struct HostEnds {
  std::string name;              // for messages
  std::vector<int> connections;  // connected and authenticated; the mesh owns them, also if its constructor throws
  std::map<int, std::shared_ptr<TlsEnd>> tls = {};  // by descriptor; those that aren't in it are in the clear
};

// The connections of one host to all others, for one cluster version. An *epoch* is a number that grows whenever what
// is under way becomes void (a failure, say); all hosts come to the same ones, each at its own time.
//
// A message is sent to a host under a tag, which is its own in that direction and epoch, and received there into memory
// of the same size. Small ones (kUnaskedBytes) may come before they are received; larger ones begin when they are.
// Messages overtake each other: nothing but its own Receive stands in the way of any.
//
// Thread-safe. All sockets are served by one thread of the mesh's own; the first bytes of a small message go out on its
// sender's. Guarantees, argued in mesh.cc and frames.cc:
//  - When a ticket has ended (Wait has returned or thrown anything but CollectiveTimeoutError or Interrupted) or is
//    destroyed, no thread reads or writes the memory that was given for it.
//  - The end of a connection, an error on it, and a frame that is none lose the host: its tickets, those there are and
//    those to come, fail with PeerLostError, which names it and says why. The others go on.
//  - After Cancel no thread reads or writes the memory of any message that was posted before, and what the others sent
//    before they came to the new epoch never gets anywhere.
//  - What an other host may have this one keep is bounded: kUnaskedCredit bytes, and kMostEarly messages asked for.
//  - No wait depends on another message's being received.
class Mesh {
 public:
  // A message that is under way. Destroying it before its end withdraws it: its memory is the caller's again, and the
  // other side's waits until its deadline, a loss or a new epoch. That may be done after the mesh's end, too.
  class Ticket {
   public:
    Ticket() = default;
    Ticket(Ticket&& other) noexcept = default;
    Ticket& operator=(Ticket&& other) noexcept {
      Drop();
      mesh_ = other.mesh_;
      transfer_ = std::move(other.transfer_);
      return *this;
    }
    ~Ticket() { Drop(); }
    // It has ended, well or not: Wait returns or throws at once.
    bool IsDone() const { return transfer_ == nullptr || transfer_->IsDone(); }

   private:
    friend class Mesh;
    Ticket(Mesh* mesh, TransferPtr transfer) : mesh_(mesh), transfer_(std::move(transfer)) {}
    void Drop() noexcept {
      if (transfer_ != nullptr && !transfer_->IsDone()) mesh_->Withdraw(*transfer_);
      transfer_ = nullptr;
    }

    Mesh* mesh_ = nullptr;  // outlives the message, if not this
    TransferPtr transfer_;
  };

  struct Bytes {
    uint64_t sent = 0, received = 0;
  };

  // `hosts` are the same at all of them; that of `self` has no connections, all others 1 to kMostConnections.
  Mesh(uint32_t self, uint64_t epoch, std::vector<HostEnds> hosts, MeshOptions options);
  // Ends all tickets as Cancel does. No other call may be under way, or begin, but the destruction of a ticket. What
  // was sent last may not arrive, since the kernel drops it if something is unread here: hosts end when all of them
  // have come to the end.
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  uint32_t self() const { return self_; }
  uint32_t size() const { return static_cast<uint32_t>(hosts_.size()); }
  const std::string& name(uint32_t host) const { return hosts_[host].name; }

  // Begin a message of `epoch`. Neither waits. Throw ValueError for a tag that is in use, this host itself, or an epoch
  // that isn't here yet; in an older one, which its caller needn't have heard of, the ticket fails with
  // StaleClusterError. The end of a Send says that the kernel has it all, not that it has arrived.
  Ticket Send(uint64_t epoch, uint32_t host, const Tag& tag, const void* data, size_t bytes);
  // `tells`: an eventfd that is told when it has ended, if the caller doesn't wait; -1: none.
  Ticket Receive(uint64_t epoch, uint32_t host, const Tag& tag, void* data, size_t bytes, int tells = -1);
  // Throws PeerLostError, StaleClusterError, CollectiveTimeoutError (after the options' time in this call), and what
  // the thread's InterruptCheck throws. After the last two the ticket is as it was.
  void Wait(const Ticket& ticket) const;

  // Ends all tickets with StaleClusterError; the mesh goes on in `epoch`, which is later than the last.
  void Cancel(uint64_t epoch);

  // The same as the end of a connection to it: its tickets fail with PeerLostError, and nothing more comes of it.
  void LoseHost(uint32_t host, const std::string& why);

  // What this host's connections carry, as the kernel has measured it of those that have carried much since the last
  // call: at least that; `is_all`, if there was more to be sent, so that the network is what sets it. 0: nothing is
  // known.
  struct Cable {
    uint64_t bytes_per_ms = 0;
    bool is_all = false;
  };
  Cable Measure();

  // On the wire, since the beginning.
  Bytes Counted(uint32_t host) const;

  static constexpr size_t kMostConnections = 16;  // of a pair

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  class Quiet;

  // What this host knows of a message that it receives, by tag.
  struct Inbound {
    enum class State {
      kPosted,    // `posted` waits for it
      kArriving,  // unasked, and it wasn't posted when it began; `posted` may have come since
      kKept,      // all of it is in `kept`
      kOffered,   // the other side waits for a READY
      kGone,      // it was withdrawn; what comes of it is dropped
    };
    State state = State::kPosted;
    TransferPtr posted;
    uint64_t total = 0;
    bool asked = false;  // a READY has gone out, so it isn't charged
    std::vector<char> kept;
  };
  // Of one that waits for the other side's READY; or, if `waiting` is null, the READY that waits for it.
  struct Outbound {
    TransferPtr waiting;
    uint64_t total = 0;
  };

  struct Host {
    std::string name;
    std::vector<std::unique_ptr<Connection>> connections;
    std::string lost;                         // why; empty: it isn't
    std::optional<Clock::time_point> ending;  // since when one of its connections is at its end
    Bytes counted;
    uint64_t measured = 0;  // of what was sent, when Measure looked last
    // Of this epoch:
    std::unordered_map<Tag, Inbound, TagHash> inbound;
    std::unordered_map<Tag, Outbound, TagHash> outbound;
    std::deque<FrameHeader> control;         // frames without a payload that are to go out
    std::deque<TransferPtr> small, granted;  // messages that may go out: unasked ones, and those with a READY
    size_t early = 0;                        // entries above that the other side has made by kReady and kOffer
    // Of unasked messages, what was charged: sent, and of that known as taken; come, of that taken, of that told.
    uint64_t sent = 0, sent_taken = 0, come = 0, taken = 0, told = 0;

    bool HasWork() const { return !control.empty() || !small.empty() || !granted.empty(); }
  };

  // ---- mesh.cc: the callers' side. mutex_ is held by the caller of a function without a lock among its arguments.
  void Check(uint64_t epoch, uint32_t host) const;
  TransferPtr NewTransfer(uint64_t epoch, uint32_t host, const Tag& tag, const char* from, char* to, size_t bytes,
                          int tells);
  void Withdraw(Transfer& transfer) noexcept;
  void EndAll(Host& host, kf_status status, const std::string& text);  // the I/O thread is in no call
  void Lose(Host& host, const std::string& why);                       // likewise
  void Wake();
  void Control(Host& host, FrameKind kind, const Tag& tag, uint64_t total);
  void Ask(Host& host, Inbound& inbound);
  void Take(Host& host, size_t bytes);

  void WriteHere(Connection& connection);

  // ---- mesh_thread.cc: the I/O thread's. A lock is released around system calls.
  void Serve();
  template <typename Body>
  void OrLose(Host& host, const Body& body);
  bool WriteAll(Lock& lock);
  bool ReadMore(Lock& lock);
  void HaveEvent(Lock& lock, Connection& connection, uint32_t events);
  void HaveEnd(Connection& connection, const std::string& why);
  void Listen(Connection& connection);
  void ResumeHeld();
  int LoseEnding();

  // ---- frames.cc: what frames are made of, and what becomes of them. Throw if the host is to be lost.
  template <typename Call>
  SocketResult Unlocked(Lock& lock, const Call& call);
  bool Write(Lock& lock, Connection& connection);
  bool Compose(Connection& connection);
  void HaveWritten(Connection& connection, size_t bytes);
  void Read(Lock& lock, Connection& connection);
  void Parse(Connection& connection);
  void Begin(Connection& connection);
  void BeginData(Host& host, Incoming& in);
  void Finish(Host& host, Incoming& in);
  void HaveReady(Host& host, const FrameHeader& header);
  void HaveOffer(Host& host, const FrameHeader& header);

  const uint32_t self_;
  const MeshOptions options_;
  const OneProcess process_;
  int epoll_ = -1, wake_ = -1;  // wake_: an eventfd

  mutable std::mutex mutex_;
  std::condition_variable quiet_, released_;
  // All guarded by mutex_:
  std::vector<Host> hosts_;
  uint64_t epoch_;
  bool busy_ = false;      // the I/O thread is in a call that reads or writes a caller's memory
  uint32_t holds_ = 0;     // how many want it to stay out of such calls: see Quiet
  bool sleeping_ = false;  // it sleeps in epoll_wait, or is about to, without having seen what comes now
  bool news_ = false;      // there is something that it may not have seen
  bool renewed_ = false;   // the epoch is new: frames that were held back may go on
  bool stop_ = false;

  std::vector<char> sink_;  // where dropped payloads go; the I/O thread's
  std::thread thread_;
};

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_MESH_H_
