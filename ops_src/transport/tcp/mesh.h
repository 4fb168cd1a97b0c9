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
  std::chrono::milliseconds timeout{600000};  // time limit of a Wait
};

// The connections to one host.
struct HostEnds {
  std::string name;              // for messages
  std::vector<int> connections;  // connected and authenticated; the mesh owns them, even if its constructor throws
  std::map<int, std::shared_ptr<TlsEnd>> tls = {};  // by descriptor; other connections don't use TLS
};

// The connections of one host to all other hosts, for one cluster version. An *epoch* is a number that grows whenever
// all current messages become void, for example after a failure. All hosts go through the same epochs, each at its own
// time.
//
// A message is sent to a host under a tag, which must be unique in that direction and epoch. It is received into memory
// of the same size. A small message (kUnaskedBytes) may be sent before its Receive is posted. A larger message is sent
// after its Receive is posted. Messages can overtake each other: a message waits only for its own Receive.
//
// Thread-safe. One thread of the mesh serves all sockets, but the sending thread itself writes the first bytes of a
// small message. The mesh guarantees the following; mesh.cc and frames.cc explain why:
//  - When a ticket is destroyed or has ended, no thread uses the memory that was passed for it. A ticket has ended if
//    Wait has returned or has thrown anything except CollectiveTimeoutError or Interrupted.
//  - If a connection ends, has an error, or carries an invalid frame, its host is lost. All current and later tickets
//    of this host fail with PeerLostError, which names the host and the reason. Tickets of other hosts continue.
//  - After Cancel, no thread uses the memory of a message that was posted before. What other hosts sent before they
//    came to the new epoch is dropped.
//  - The memory that another host can make this host keep is limited: kUnaskedCredit bytes, and kMostEarly requested
//    messages.
//  - No wait depends on whether another message is received.
class Mesh {
 public:
  // A message that is being sent or received. If a ticket is destroyed before its end, its message is withdrawn. The
  // caller gets the memory back. The other side's ticket waits until its deadline, a loss or a new epoch. A ticket may
  // also be destroyed after its mesh.
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
    // Whether the message has ended, with or without an error. Then Wait returns or throws at once.
    bool IsDone() const { return transfer_ == nullptr || transfer_->IsDone(); }

   private:
    friend class Mesh;
    Ticket(Mesh* mesh, TransferPtr transfer) : mesh_(mesh), transfer_(std::move(transfer)) {}
    void Drop() noexcept {
      if (transfer_ != nullptr && !transfer_->IsDone()) mesh_->Withdraw(*transfer_);
      transfer_ = nullptr;
    }

    Mesh* mesh_ = nullptr;  // outlives the message, but maybe not the ticket
    TransferPtr transfer_;
  };

  struct Bytes {
    uint64_t sent = 0, received = 0;
  };

  // `hosts` must be the same at all hosts, except that the entry of `self` has no connections. All other entries have 1
  // to kMostConnections.
  Mesh(uint32_t self, uint64_t epoch, std::vector<HostEnds> hosts, MeshOptions options);
  // Ends all tickets, like Cancel. During and after the call, no other call is allowed except the destruction of a
  // ticket. The last sent data may not arrive, because the kernel drops it if this host has unread data. So hosts end
  // only when all of them have finished.
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  uint32_t self() const { return self_; }
  uint32_t size() const { return static_cast<uint32_t>(hosts_.size()); }
  const std::string& name(uint32_t host) const { return hosts_[host].name; }

  // Send and Receive begin a message of `epoch`, without waiting. They throw ValueError if the tag is in use, if `host`
  // is this host, or if `epoch` hasn't begun here. If `epoch` has ended, which the caller may not know, the ticket
  // fails with StaleClusterError. When a Send has ended, the kernel has accepted all data; the data may not have
  // arrived.
  Ticket Send(uint64_t epoch, uint32_t host, const Tag& tag, const void* data, size_t bytes);
  // `tells`: an eventfd that is written when the message ends, for callers that don't wait; -1: none.
  Ticket Receive(uint64_t epoch, uint32_t host, const Tag& tag, void* data, size_t bytes, int tells = -1);
  // Waits until the message has ended. Throws PeerLostError, StaleClusterError, CollectiveTimeoutError (after
  // MeshOptions::timeout in this call), and what the thread's InterruptCheck throws. After a timeout or an interrupt,
  // the ticket is still valid.
  void Wait(const Ticket& ticket) const;

  // Ends all tickets with StaleClusterError. The mesh continues in `epoch`, which must be later than the current one.
  void Cancel(uint64_t epoch);

  // Treats the host as if a connection to it had ended: its tickets fail with PeerLostError, and nothing more is
  // received from it.
  void LoseHost(uint32_t host, const std::string& why);

  // Returns the rate of this host's connections, as measured by the kernel. Only connections that have carried much
  // data since the last call are measured. Their real capacity is at least the returned rate. If `is_all`, more data
  // was waiting, so the network is the limit. The rate is 0 if it isn't known.
  struct Cable {
    uint64_t bytes_per_ms = 0;
    bool is_all = false;
  };
  Cable Measure();

  // Returns the bytes sent to and received from the host since the beginning.
  Bytes Counted(uint32_t host) const;

  static constexpr size_t kMostConnections = 16;  // limit between two hosts

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  class Quiet;

  // This host's state of a message that it receives. Stored by tag.
  struct Inbound {
    enum class State {
      kPosted,    // `posted` waits for the message
      kArriving,  // arrives unasked and wasn't posted when it began; `posted` may be set since then
      kKept,      // the whole message is in `kept`
      kOffered,   // the other side waits for a READY
      kGone,      // withdrawn; what arrives of it is dropped
    };
    State state = State::kPosted;
    TransferPtr posted;
    uint64_t total = 0;
    bool asked = false;  // a READY was sent, so the message isn't charged
    std::vector<char> kept;
  };
  // An outgoing message that waits for the other side's READY. If `waiting` is null, the READY has arrived before the
  // message was posted.
  struct Outbound {
    TransferPtr waiting;
    uint64_t total = 0;
  };

  struct Host {
    std::string name;
    std::vector<std::unique_ptr<Connection>> connections;
    std::string lost;                         // the reason of the loss; empty: the host isn't lost
    std::optional<Clock::time_point> ending;  // since when one of its connections has been closed
    Bytes counted;
    uint64_t measured = 0;  // bytes sent at the last Measure
    // For this epoch:
    std::unordered_map<Tag, Inbound, TagHash> inbound;
    std::unordered_map<Tag, Outbound, TagHash> outbound;
    std::deque<FrameHeader> control;         // frames without a payload that wait to be sent
    std::deque<TransferPtr> small, granted;  // messages that can be sent: unasked ones, and those with a READY
    size_t early = 0;                        // entries above that the other side has created by kReady and kOffer
    // Charges for unasked messages. Outgoing: `sent`, and the part that the other side has reported as taken. Incoming:
    // `come`, the part that was taken, and the part of this that was reported.
    uint64_t sent = 0, sent_taken = 0, come = 0, taken = 0, told = 0;

    bool HasWork() const { return !control.empty() || !small.empty() || !granted.empty(); }
  };

  // // ---- mesh.cc: the callers' side. If a function has no lock argument, its caller holds mutex_.
  void Check(uint64_t epoch, uint32_t host) const;
  TransferPtr NewTransfer(uint64_t epoch, uint32_t host, const Tag& tag, const char* from, char* to, size_t bytes,
                          int tells);
  void Withdraw(Transfer& transfer) noexcept;
  void EndAll(Host& host, kf_status status, const std::string& text);  // the I/O thread must not be in a system call
  void Lose(Host& host, const std::string& why);                       // the I/O thread must not be in a system call
  void Wake();
  void Control(Host& host, FrameKind kind, const Tag& tag, uint64_t total);
  void Ask(Host& host, Inbound& inbound);
  void Take(Host& host, size_t bytes);

  void WriteHere(Connection& connection);

  // // ---- mesh_thread.cc: the I/O thread. It releases `lock` during system calls.
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

  // // ---- frames.cc: frames are composed and handled. These functions throw if the host must be lost.
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
  // Guarded by mutex_:
  std::vector<Host> hosts_;
  uint64_t epoch_;
  bool busy_ = false;      // the I/O thread is in a call that reads or writes a caller's memory
  uint32_t holds_ = 0;     // number of threads that keep the I/O thread out of such calls: see Quiet
  bool sleeping_ = false;  // the I/O thread is in epoll_wait or about to be, and must be woken for new work
  bool news_ = false;      // there may be work that the I/O thread hasn't seen
  bool renewed_ = false;   // the epoch is new: frames that were held back can be handled
  bool stop_ = false;

  std::vector<char> sink_;  // destination of dropped payloads; used by the I/O thread
  std::thread thread_;
};

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_MESH_H_
