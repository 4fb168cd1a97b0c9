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
#include "base/polling.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/socket.h"

namespace kungfu::tcp {

struct MeshOptions {
  std::chrono::milliseconds timeout{600000};  // time limit of a call of Wait
  // The interval at which a waiting thread checks whether its wait can succeed. At most
  // RunTime::kLongestSlice, except in tests that would not notice a lost wake-up otherwise.
  std::chrono::milliseconds slice{20};
  // The time for which waiting threads may keep the connections after a wait (mesh_thread.cc).
  std::chrono::milliseconds lent{2};
  // If a thread has waited for longer than `lent`, the I/O thread checks at this interval whether
  // that thread still serves the connections.
  std::chrono::milliseconds look{20};
};

// The connections to one other host.
struct HostEnds {
  std::string name;              // the host's name in messages
  std::vector<int> connections;  // connected and authenticated sockets; the mesh owns them, even if its constructor
                                 // throws
  std::map<int, std::shared_ptr<TlsEnd>> tls = {};  // by descriptor; a connection that isn't in this map doesn't use
                                                    // TLS
};

// The connections of one host to all other hosts, for one cluster version. An *epoch* is a number
// that grows whenever all current messages become void, for example after a failure. All hosts go
// through the same epochs, but each host at its own time.
//
// A message is sent to a host with a tag, which must be unique in that direction and epoch. The
// receiver provides memory of the same size. A small message (kUnaskedBytes) may be sent before its
// Receive is posted. A larger message is sent after its Receive is posted. Messages can overtake
// each other, because a message waits only for its own Receive.
//
// Thread-safe. A thread of the mesh serves all sockets. But a sending thread itself writes small
// messages, and a thread that waits for a small message reads the sockets itself. The mesh guarantees
// the following (mesh.cc, mesh_thread.cc and frames.cc explain why):
//  - When a ticket is destroyed or has ended, no thread uses the memory that was passed for it. A ticket has ended if
//    Wait has returned or has thrown anything except CollectiveTimeoutError or Interrupted.
//  - If a connection ends, has an error, or carries an invalid frame, its host is lost. All current and later tickets
//    of this host fail with PeerLostError, which names the host and the reason. Tickets of other hosts continue.
//  - After Cancel, no thread uses the memory of a message that was posted before. Data that other hosts sent in an
//    earlier epoch is dropped.
//  - Another host can make this host keep only a limited amount of memory: kUnaskedCredit bytes, and kMostEarly
//    requested messages.
//  - No wait depends on whether another message is received.
class Mesh {
 public:
  // A message that is being sent or received. If a ticket is destroyed before the message has
  // ended, the message is withdrawn, and the caller gets the memory back. The other side's ticket
  // then waits until its deadline, a loss or a new epoch. A ticket may also be destroyed after its
  // mesh.
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
    // Returns true if the message has ended, with or without an error. Then Wait returns or throws
    // immediately.
    bool IsDone() const { return transfer_ == nullptr || transfer_->IsDone(); }

   private:
    friend class Mesh;
    Ticket(Mesh* mesh, TransferPtr transfer) : mesh_(mesh), transfer_(std::move(transfer)) {}
    void Drop() noexcept {
      if (transfer_ != nullptr && !transfer_->IsDone()) mesh_->Withdraw(*transfer_);
      transfer_ = nullptr;
    }

    Mesh* mesh_ = nullptr;  // the mesh outlives the message, but not always the ticket
    TransferPtr transfer_;
  };

  struct Bytes {
    uint64_t sent = 0, received = 0;
  };

  // `hosts` must be the same on all hosts, except that the entry for `self` has no connections. All
  // other entries have 1 to kMostConnections connections.
  Mesh(uint32_t self, uint64_t epoch, std::vector<HostEnds> hosts, MeshOptions options);
  // Ends all tickets, like Cancel. During the call, no other call is allowed. After the call,
  // tickets may still be destroyed. The data that was sent last might not arrive, because the
  // kernel drops it if this host has unread data. So a host must end its mesh only when all hosts
  // have finished.
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  uint32_t self() const { return self_; }
  uint32_t size() const { return static_cast<uint32_t>(hosts_.size()); }
  const std::string& name(uint32_t host) const { return hosts_[host].name; }

  // Send and Receive begin a message of `epoch`, without waiting. They throw ValueError if the tag
  // is in use, if `host` is this host, or if `epoch` hasn't begun on this host. If `epoch` has
  // already ended, the ticket fails with StaleClusterError. When the ticket of Send has ended, the
  // kernel has accepted all data, but the data might not have arrived yet.
  Ticket Send(uint64_t epoch, uint32_t host, const Tag& tag, const void* data, size_t bytes);
  // `tells` is an eventfd that is written when the message ends, for callers that don't wait (-1:
  // none).
  Ticket Receive(uint64_t epoch, uint32_t host, const Tag& tag, void* data, size_t bytes, int tells = -1);
  // Waits until the message has ended. Throws PeerLostError, StaleClusterError,
  // CollectiveTimeoutError (if this call lasts longer than MeshOptions::timeout), and the errors
  // that the thread's InterruptCheck throws. After a timeout or an interrupt, the ticket is still
  // valid.
  void Wait(const Ticket& ticket);

  // Ends all tickets with StaleClusterError. The mesh continues in `epoch`, which must be later than the current one.
  void Cancel(uint64_t epoch);

  // Treats the host as if a connection to it had ended. Its tickets fail with PeerLostError, and
  // nothing more is received from it.
  void LoseHost(uint32_t host, const std::string& why);

  // Returns the rate of this host's connections, as the kernel has measured it. The rate includes
  // only connections that have carried much data since the last call. The real capacity of these
  // connections is at least the returned rate. If `is_all` is true, more data was waiting, so the
  // network is the limit. The rate is 0 if it isn't known.
  struct Cable {
    uint64_t bytes_per_ms = 0;
    bool is_all = false;
  };
  Cable Measure();

  // Returns the total number of bytes sent to the host and received from it.
  Bytes Counted(uint32_t host) const;

  static constexpr size_t kMostConnections = 16;  // maximum number of connections between two hosts

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  // While this object lives, no thread reads or writes callers' memory without holding the mutex. The
  // caller must hold the mutex.
  class Quiet {
   public:
    Quiet(Mesh& mesh, Lock& lock);
    ~Quiet();
    Quiet(const Quiet&) = delete;
    Quiet& operator=(const Quiet&) = delete;

   private:
    Mesh& mesh_;
  };

  // What this host knows about a message that it receives. Stored by tag.
  struct Inbound {
    enum class State {
      kPosted,    // `posted` is waiting for the message
      kArriving,  // an unsolicited message that wasn't posted when it began to arrive; `posted` may be set since then
      kKept,      // the whole message is in `kept`
      kOffered,   // the other side is waiting for a READY
      kGone,      // the message was withdrawn, so the rest of it is dropped when it arrives
    };
    State state = State::kPosted;
    TransferPtr posted;
    uint64_t total = 0;
    bool asked = false;  // this host has sent a READY, so the message doesn't count against the credit
    std::vector<char> kept;
  };
  // An outgoing message that is waiting for the other side's READY. If `waiting` is null, the READY
  // has arrived before the message was posted.
  struct Outbound {
    TransferPtr waiting;
    uint64_t total = 0;
  };

  enum class Driver { kNone, kAwake, kSleeps };
  static constexpr uint64_t kWake = 0, kSockets = 1;  // keys in an epoll; other keys are addresses of connections

  struct Host {
    std::string name;
    std::vector<std::unique_ptr<Connection>> connections;
    std::string lost;                         // the reason for the loss; empty if the host isn't lost
    std::optional<Clock::time_point> ending;  // the time at which one of the host's connections was closed
    Bytes counted;
    uint64_t measured = 0;  // number of bytes that had been sent at the last Measure
    // These members belong to the current epoch:
    std::unordered_map<Tag, Inbound, TagHash> inbound;
    std::unordered_map<Tag, Outbound, TagHash> outbound;
    std::deque<FrameHeader> control;         // frames without a payload that are waiting to be sent
    std::deque<TransferPtr> small, granted;  // messages that can be sent: unsolicited ones, and those for which a
                                             // READY has arrived
    size_t early = 0;                        // number of entries in `inbound` and `outbound` that the other side has
                                             // created with kReady and kOffer
    // Bytes of unsolicited messages that count against the credit. Outgoing: `sent`, and
    // `sent_taken`, which the other side has reported as taken. Incoming: `come` (received),
    // `taken` (consumed by this host), and `told` (reported as taken).
    uint64_t sent = 0, sent_taken = 0, come = 0, taken = 0, told = 0;

    bool HasWork() const { return !control.empty() || !small.empty() || !granted.empty(); }
  };

  // ---- mesh.cc: the functions for callers. If a function has no lock argument, its caller must
  // hold mutex_.
  static std::vector<Host> Own(std::vector<HostEnds>& ends);
  void Check(uint64_t epoch, uint32_t host) const;
  TransferPtr NewTransfer(uint64_t epoch, uint32_t host, const Tag& tag, const char* from, char* to, size_t bytes,
                          int tells);
  void Withdraw(Transfer& transfer) noexcept;
  void EndAll(Host& host, kf_status status, const std::string& text);
  void Lose(Host& host, const std::string& why);
  void Wake();
  void WakeThread();
  void Close(Connection& connection);
  void Stir();
  void Control(Host& host, FrameKind kind, const Tag& tag, uint64_t total);
  void Ask(Host& host, Inbound& inbound);
  void Take(Host& host, size_t bytes);

  // ---- mesh_thread.cc: the I/O thread. It releases `lock` during system calls.
  void Serve();
  void HandleEvents(Lock& lock, int wait_ms, const Transfer* own);
  void WaitSlice(Transfer& transfer);
  void Drive(Lock& lock, const Transfer& transfer);
  int LentFor();
  void TakeBack();
  // Runs `body`. If `body` throws, declares the host lost.
  template <typename Body>
  void OrLose(Lock& lock, Host& host, const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {  // includes the error that there is no memory
      const Quiet quiet(*this, lock);
      Lose(host, error.what());
    }
  }
  bool WriteAll(Lock& lock);
  bool ReadMore(Lock& lock);
  void HaveEvent(Lock& lock, Connection& connection, uint32_t events);
  void HaveEnd(Lock& lock, Connection& connection, const std::string& why);
  void Listen(Connection& connection);
  void BeginEnding(Host& host);
  void ResumeHeld(Lock& lock);
  int LoseEnding(Lock& lock);

  // ---- frames.cc: compose and handle frames. These functions throw if the host must be declared
  // lost.
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
  std::vector<Host> hosts_;  // guarded by mutex_; created first, because it owns the sockets
  Epoll sockets_;            // watches all connections, and `stir_`
  Epoll epoll_;              // watches `sockets_` and `wake_`; the I/O thread sleeps in it
  Event wake_, stir_;        // wake the I/O thread, and the driver

  mutable std::mutex mutex_;
  std::condition_variable quiet_, released_;
  // `mutex_` guards these members:
  uint64_t epoch_;
  uint32_t busy_ = 0;     // number of threads in a system call that reads or writes a caller's memory
  uint32_t holds_ = 0;    // number of threads that keep others out of such calls: see Quiet
  bool reading_ = false;  // the I/O thread or the driver handles the connections' events
  Driver driver_ = Driver::kNone;
  bool lends_ = true;             // waiting threads may read: no connection uses TLS, and no message has had an eventfd
  bool lent_ = false;             // the connections' events don't wake the I/O thread
  uint32_t sleepers_ = 0;         // number of threads that wait without driving
  Clock::time_point lent_until_;  // meaningful if `lent_` is set and there is no driver
  const Transfer* driven_ = nullptr;  // the last driver's message; only compared, because it may no longer exist
  uint64_t drives_ = 0;               // how often `driven_` has changed
  uint64_t drives_seen_ = 0;          // `drives_` at the I/O thread's last check
  bool looks_late_ = false;           // the I/O thread's next check is late, so the driver must wake it
  bool sleeping_ = false;             // the I/O thread is in epoll_wait or about to be, so new work must wake it
  bool news_ = false;                 // there may be work that no thread has seen
  bool renewed_ = false;              // a new epoch has begun, so frames that were held back can be handled
  bool stop_ = false;

  std::vector<char> sink_;  // destination of dropped payloads; only the thread that has set `reading_` uses it
  std::thread thread_;
};

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_MESH_H_
