// A host's transport runs the host's part of operations over several hosts. The transport is part
// of the host's launcher.
//
// The invariants below show that every operation ends in the same way on all ranks. Other files
// refer to their numbers. Each invariant names the tests that cover it (tests/cpp), and
// tests/unit/test_invariants.py checks that these tests exist.
//
// Terms
//
// Generation g of the cluster has all ranks except the first g failed ranks. The control block
// lists the failures in the same order on all hosts. Each host's segment also lists the failures of
// the host's own ranks, in the same order. To ensure this order, the host's launcher adds a failure
// first to the control block, and then to the segment of its host.
//
// An epoch is the time between two losses of hosts. Each transport counts the epochs.
//
// Steps of an operation
//
// A transport is the last member of its host's segment. When a rank begins an operation, it
// notifies its transport (Request). Then the ranks of the host and the transport run these three
// steps, each as an operation within the host (host_communicator.h):
//
// "Reduce-to-host" sends the ranks' contributions to the transport, either reduced or one after
// another. "Commit" broadcasts the transport's decision, after the transport has received the
// headers of all other hosts. "Broadcast" sends the result to the ranks. If all members pin the
// staging buffer of reduce-to-host (Pinned), the ranks read the result from that buffer instead. A
// small result is included in the commit.
//
// Between reduce-to-host and commit, the transports exchange headers, which describe what each host
// contributes (Header). Then they exchange the data (algorithm.h). The k-th operation with a name
// on one host matches the k-th operation with that name on every other host. A large all-reduce
// consists of several operations, its slices. Slices run concurrently on tracks. Each track counts
// its operations separately (slices.h).
//
// Failures of ranks
//
// 1. If ranks of a host fail, a reduce-to-host may exclude the first i of them. All its members
// agree on i (failure_rules.cc). The transport is also a member, and it fails only if its whole
// host fails. So the number i and the contributions of the other ranks completely describe a host's
// contribution.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverOneFails
// Test: ClusterFailures.SurvivorsOfAllHostsComeToTheSameEnd
//
// 2. A header contains the number i (see 1). A host's contribution fits generation g if exactly i
// of the first g failed ranks are on that host. Every transport has all headers, so all transports
// compute the same generation G. G is the earliest generation that excludes every rank that any
// contribution excludes. If G excludes more ranks of a host than the host's contribution does, the
// host's remaining ranks contribute again. The other hosts keep their contributions. Then the
// transports send headers once more. Each round has a later G, so the number of rounds is at most
// the number of failures.
// Test: ClusterFailures.SurvivorsOfAllHostsComeToTheSameEnd
// Test: Cluster.FewBytesAreBroughtAgainWithoutFailedRanks
//
// 3. The transports combine the contributions only if all of them fit G. From then on, the failure
// of a rank changes nothing, because the transports have the contribution of that rank. So an
// operation ends in G on every rank that keeps running until the operation ends.
// Test: ClusterFailures.SurvivorsOfAllHostsComeToTheSameEnd
//
// 4. An operation that adds up planes (planes.h) depends on which ranks contribute. So each host
// whose contribution is for an earlier generation contributes again in G.
// Test: ShardsFailures.AStepIsWholeWhereverOneFails
// Test: ShardsStep.IsWholeWithoutARankThatStopsInTheMiddle
//
// 5. A host may receive a header that counts a failure before the host's control block lists this
// failure. A transport or rank that needs the failure waits until the control block lists it.
// Test: ClusterFailures.SurvivorsOfAllHostsComeToTheSameEnd
//
// 6. If no rank of a host is running any more, the host begins no more operations, and its ranks
// can't notify the other hosts. So the host's transport sends one message to the other hosts: the
// number of operations that the host's ranks had begun with each name (Ending). The host
// contributes to these operations, and to no later ones.
// Test: ClusterEnds.FailureAfterTheEndOfItsRanksReachesTheOthers
// Test: Cluster.FewBytesAreThoseOfHostsWithRanks
//
// The communicator ends on all hosts in two cases: an error occurs that not all ranks share, or a
// rank fails and the launcher's policy is to fail. In both cases, the transport of the affected
// host notifies the other transports. It also gives up in its own segment, which ends all waits of
// its ranks. A transport that is in a later epoch ignores the notice. In that case, the launcher of
// the failed transport reports the error to the job's controller, which ends the waits on the other
// host.
// Test: ClusterFailures.WithoutRecoveryAllFail
// Test: ClusterEnds.RankThatGivesUpEndsTheWaitsOnOtherHosts
//
// Losses of hosts
//
// If the launcher's policy is to recover, a transport waits when its connection to a host has
// ended. The job's controller decides which hosts are lost. When the control block lists all ranks
// of the lost host as failed, the controller notifies the transports of all other hosts (LoseHost).
// The controller notifies all transports of the same hosts in the same order. Each loss begins a
// new epoch. The transports then cancel all messages between hosts (Mesh::Cancel), and agree again
// on the outcome of each operation.
//
// 7. An outcome is either a result, or a failure that all hosts share. A transport gives its ranks
// an outcome only when it knows that all hosts have this outcome. So the transports confirm the
// outcome in one more round after the exchange (Acknowledge), in the epoch of the outcome. If a new
// epoch begins first, a transport keeps its outcome until the hosts agree again (8). A failure
// among the ranks of one host needs no confirmation: these ranks know of the failure. If their host
// is lost, no other host needs to know of it.
// Test: HostLoss.ALostHostContributesToASumForAllOrNone
// Test: HostLoss.ABroadcastFromALostHostIsHadByAllOrNone
//
// 8. In a new epoch, an operation begins again with headers. If a host has an outcome, its header
// contains the epoch in which the host got the outcome. If all hosts have an outcome of the same
// epoch, they give this outcome to their ranks. Otherwise, by 7, no host has given its ranks an
// outcome. All transports then drop their outcomes and continue with their ranks' contributions,
// which a transport keeps until it gives an outcome. The ranks of the lost host have failed, so G
// is a generation without them.
// Test: HostLoss.ALostHostContributesToASumForAllOrNone
// Test: HostLoss.ALostHostContributesToASumOfSlicesForAllOrNone
//
// 9. A host that has given the outcome of an operation to its ranks has left the operation, and
// sends no more headers for this operation. So each transport begins an epoch with a message. For
// each name, this message contains the number of operations whose outcome the transport has given.
// If the message shows that a host has left an operation, then, by 7, all hosts have the outcome. A
// transport may give an outcome only in the epoch in which the hosts have agreed on it (Finish). A
// thread that is too late continues in the next epoch.
// Test: HostLoss.ALostHostContributesToASumForAllOrNone
// Test: ClusterFailures.SurvivorsComeToTheSameEndWhereHostsAreLost
//
// 10. Two hosts may be lost in quick succession. A transport that dropped its outcome in the first
// new epoch reports in the second new epoch that it has no outcome. If it has got another outcome
// since then, it reports that outcome, which belongs to a later epoch. A transport that hadn't
// finished the first new epoch reports its earlier outcome. So if the transports conclude that all
// hosts have the same outcome, the conclusion is correct. A host gives an outcome only after all
// hosts have confirmed it in one epoch (7). So no host has given an outcome that another host has
// dropped.
// Test: ClusterFailures.SurvivorsComeToTheSameEndWhereHostsAreLost
//
// 11. A broadcast may have several source ranks with the same data. All ranks pass the same source
// ranks, which are part of the signature. So every transport knows which hosts have a source rank.
// A host with a source rank contributes the data of that rank, as the root's host does. The
// operation fails on all ranks in two cases. Either a source rank fails before its transport has
// the data, so that the operation fails on all ranks of that host (1). Or the host of a source rank
// has no ranks left, which all transports know by 2 and 6. Each host without a source rank gets the
// data from a host with a source rank. The transports assign the former to the latter round-robin,
// in the order of the hosts that have ranks in G. The caller guarantees that the source ranks have
// the same data.
// Test: Cluster.BroadcastUsesTheSourceRankOfTheSameHost
// Test: ClusterFailures.BroadcastFromAFailedSourceFailsAndAnotherSourceServes
//
// Algorithms between hosts
//
// 12. With AUTO, three things determine the algorithm of an operation (SelectAlgorithm): the
// measurements in the headers of the last round, the operation's size, and whether the operation is
// a slice. By 2, all transports have the same headers, so they choose the same algorithm. A
// transport reads its own measurements once per round, when it creates its header. A later change
// of the measurements affects only the next operation. An operation that is repeated in a later
// generation or epoch has new headers. No rank has got its earlier result (8).
// Test: Cluster.AllHostsTakeTheAlgorithmThatOneOfThemHasMeasured
// Test: HostsAuto.ChangesOverByWhatWasMeasuredAndByTheNumberOfHosts
//
// 13. With AUTO, small contributions travel in the headers. When all contributions fit G, each
// transport reduces them without further messages, in the order of recursive doubling. To keep the
// measurements up to date, the first of every kMeasuredEvery operations with a name runs the
// selected algorithm instead. While any host has no measurement, every operation runs the selected
// algorithm. By 12, all transports know which operations these are.
// Test: Cluster.FewBytesGoWithTheHostsWords
// Test: HostLoss.ALostHostContributesToASumOfFewBytesForAllOrNone
//
// Deadlocks
//
// A rank in reduce-to-host waits for ranks of its host and for the transport. The transport waits,
// in the operation's own thread, for these ranks and for the headers of the same operation. There
// are as many threads as running operations, so no operation waits for the thread of another
// operation. The thread that reads requests runs no operation (Listen, or the dispatcher).
// Test: Cluster.OperationsOfSeveralThreadsGoSideBySide
#ifndef KUNGFU_COLLECTIVES_HOSTS_TRANSPORT_H_
#define KUNGFU_COLLECTIVES_HOSTS_TRANSPORT_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/polling.h"
#include "collectives/host/host_communicator.h"
#include "collectives/hosts/meter.h"
#include "collectives/hosts/protocol.h"
#include "collectives/hosts/selector.h"
#include "transport/shm/segment_control_block.h"
#include "transport/tcp/mesh.h"

namespace kungfu::hosts {

struct Scratch;
class ScratchPool;

// The transport of one host in one cluster version. Thread-safe.
class Transport {
 public:
  // `local` is the segment whose members are the ranks of `host` and the transport.
  // `control_segment` contains all ranks of the cluster. `ends` contains the connections to the other
  // hosts, in the order of `places`. `strategy` must be the same on all hosts.
  Transport(const std::shared_ptr<shm::Segment>& local, const std::shared_ptr<shm::Segment>& control_segment,
            Places places, uint32_t host, std::vector<tcp::HostEnds> ends, Strategy strategy = Strategy::kAuto);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  // Returns a socket on which the process of rank `local_rank` of the segment sends its requests.
  // The caller closes the socket.
  int Connect(uint32_t local_rank);
  // Declares `host` lost, so that the other hosts continue without it. The control blocks of all
  // hosts must already list all ranks of `host` as failed. The calls on all transports must name
  // the same hosts in the same order.
  void LoseHost(uint32_t host);
  // Returns the hosts to which the connection has ended, with the reason. Omits hosts that were
  // passed to LoseHost.
  std::vector<std::pair<uint32_t, std::string>> Unreachable() const;
  // Makes all current and later operations fail with this error, on this host and on the other
  // hosts. Only the first error counts.
  void Fail(kf_status status, const std::string& text);
  Meter& meter() { return meter_; }
  // Returns the number of bytes of memory that is kept for later operations.
  size_t idle_bytes() const;
  // Returns why the transport has failed, or an empty string.
  std::string failure() const;
  // Ends all operations. Call this only if no rank of the host is in an operation.
  void Close();

 private:
  struct Header;
  struct Ending;
  // A name, and the operations that this host's ranks run with this name. A name is never deleted,
  // because all hosts must keep the same count of operations.
  struct Name {
    std::string name;
    uint8_t track = 0;
    uint64_t hash = 0;            // hash of name and track (KeyOf), by which hosts identify the name
    std::vector<uint64_t> asked;  // number of operations that each rank has begun
    uint64_t begun = 0;           // number of the operation that is running, or that ran last
    uint64_t given = 0;           // number of the last operation whose outcome the ranks have, or are about to get
    uint64_t let_on = 0;          // number of the last operation whose ranks got kMore; used only by that operation's
                                  // thread
    bool runs = false;
    std::vector<uint32_t> awaited;  // the hosts that the running operation was waiting for at its last check
    std::deque<Request> waiting;    // operations that wait until the previous operation has ended
    // For operations that add up planes: the key is (number of the operation, generation), and the
    // value is the request for that generation.
    std::map<std::pair<uint64_t, uint32_t>, Request> renewals;
  };
  class Renewal;
  // The contribution of this host's ranks to an operation.
  struct Contribution {
    uint32_t missing = 0;     // number of this host's failed ranks that the contribution excludes
    uint32_t generation = 0;  // the earliest generation of the cluster that the contribution fits
    uint64_t weight = 0;
    HostCommunicator::Pinned pinned;
    // True if the operation has failed on all ranks of this host with the following error. The
    // ranks already know about the failure.
    bool failed = false;
    kf_status status = KF_OK;
    std::string text;
  };

  // The outcome of an operation, which might not be known yet.
  struct Outcome {
    uint64_t epoch = 0;  // the epoch in which the transport got the outcome; 0 if it has no outcome yet
    Commit commit;
    std::string text;  // error text of a failure
  };
  struct Talk;
  // The kinds of messages between hosts in one operation. Each kind has its own tags.
  enum class Message : uint8_t { kData, kHeader, kAcknowledgement };
  // The state of an operation between hosts, during one epoch.
  struct Place {
    Name& name;
    const Request& request;
    uint64_t number;
    uint64_t epoch;
    uint64_t attempt = 0;

    tcp::Tag TagOf(Message message) const;
  };

  // ---- transport.cc: requests, threads, and the end of the hosts' ranks
  void Serve();
  void Hear(uint32_t local_rank, int fd);
  void Answer(int fd, const Request& question) const;
  void Begin(uint32_t local_rank, Request request);
  void HearRequests(int wait_ms);
  void Listen(std::unique_lock<std::mutex>& lock);
  void Work();
  void BeginTalks(std::vector<Talk>& talks, uint64_t epoch);
  void HearEnds(std::vector<Talk>& talks, uint64_t epoch);
  void Say(std::vector<Talk>& talks, Ending ending, uint64_t epoch, uint64_t step);
  bool HasFailed(Ending& ending) const;
  bool IsOver(Ending& ending);
  bool IsLost(uint32_t host) const;
  std::string OwnTrouble(const std::exception& error) const;
  void ThrowIfAbsent(uint32_t host, const Place& place) const;

  // ---- transport_operation.cc: one operation
  void Run(Name& name, const Request& request, uint64_t number);
  void RunOrThrow(Name& name, const Request& request, uint64_t number, Scratch& scratch);
  bool Agree(Place& place, Contribution& contribution, bool& brought, Outcome& outcome, Scratch& scratch);
  void AwaitEpochAfter(uint64_t epoch) const;
  uint64_t Epoch() const;
  bool Finish(Name& name, uint64_t number, uint64_t epoch);
  void Acknowledge(const Place& place, uint64_t got);
  Contribution ReduceToHost(const Name& name, const Request& request, uint64_t number, uint32_t generation,
                            Scratch& scratch);
  const Request* RenewalOf(const Name& name, uint64_t number, uint32_t generation);
  std::vector<Header> Meet(Place& place, const Header& mine);
  template <typename Words, typename Absent>
  void Trade(const Place& place, const tcp::Tag& tag, const Words& mine, std::vector<Words>& theirs,
             const Absent& absent);
  template <typename Look>
  void AwaitHost(const tcp::Mesh::Ticket& heard, const tcp::Mesh::Ticket& said, const Look& look);
  static void LookWhileWaiting();
  std::optional<std::pair<Commit, std::string>> FailureIn(const Name& name, const Request& request,
                                                          const std::vector<Header>& headers) const;
  void Exchange(const Place& place, uint32_t generation, const Contribution& contribution,
                const std::vector<Header>& headers, Scratch& scratch);
  const void* Scaled(const Request& request, uint32_t generation, const std::vector<Header>& headers, uint32_t host,
                     const char* contribution, char* scaled) const;
  void ReduceSmall(const Place& place, uint32_t generation, const Members& members, const std::vector<Header>& headers,
                   Scratch& scratch) const;
  void ExchangeRows(const Place& place, const tcp::Tag& tag, uint32_t generation, Scratch& scratch);
  void ExchangeCopy(const Place& place, const tcp::Tag& tag, uint32_t generation, const std::vector<Header>& headers,
                    Scratch& scratch);
  void ExchangePlanes(const Place& place, const tcp::Tag& tag, uint32_t generation, Scratch& scratch);
  void Give(const Name& name, const Request& request, const Commit& commit, const std::string& text,
            const Scratch& scratch);
  void GiveResult(const Name& name, const Request& request, const Scratch& scratch);
  std::optional<uint32_t> SourceOn(uint32_t host, const Request& request) const;
  bool HasRanks(uint32_t host, uint32_t generation) const;
  Members LivingIn(uint32_t generation) const;
  void AwaitFailures(uint32_t num_failed) const;
  uint32_t AwaitLocalFailures(uint32_t generation) const;
  uint32_t AwaitGenerationWithout(uint32_t host, uint32_t missing) const;
  uint32_t AwaitGenerationWithout(uint32_t missing) const { return AwaitGenerationWithout(host_, missing); }
  std::optional<uint32_t> FinishedOn(uint32_t host) const;
  void Pause() const;

  const Places places_;
  const uint32_t host_;
  const uint32_t self_;  // the transport's rank in the segment
  const Strategy strategy_;
  shm::SegmentControlBlock control_, local_control_;
  tcp::Mesh mesh_;
  static constexpr uint64_t kWake = UINT64_MAX, kRequests = UINT64_MAX - 1;  // keys in an epoll
  mutable Meter meter_;                                                      // has its own lock
  const std::unique_ptr<HostCommunicator> local_;
  const std::unique_ptr<ScratchPool> scratches_;
  Epoll requests_;     // watches the ranks' sockets
  Epoll epoll_;        // watches `requests_` and `wake_`; the dispatcher sleeps in it
  Event wake_, call_;  // wake the dispatcher, and the thread in Listen

  std::mutex hearing_;  // held while a request is read and begun, so that requests keep their order
  std::mutex losing_;   // held while an epoch begins, so that epochs begin one after another
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // notified when something changes that running operations check
  std::condition_variable begins_;   // notified when an operation begins, or when the transport closes
  // `mutex_` guards these members:
  std::unordered_map<std::string, std::unique_ptr<Name>> names_;
  std::deque<Name*> ready_;  // names that have operations to run
  std::vector<std::thread> workers_;
  uint32_t idle_ = 0;
  std::thread::id listener_;                     // the thread in Listen; std::thread::id() if there is none
  std::vector<std::pair<uint32_t, int>> heard_;  // ranks, and the sockets on which they send requests
  uint64_t epoch_;
  std::vector<bool> lost_;                // hosts that were passed to LoseHost
  std::vector<std::string> unreachable_;  // for each host: how the connection to it has ended
  std::optional<Error> failed_;
  bool closing_ = false;
  bool begins_nothing_ = false;  // true if the message about the end of this host's ranks has been or is being sent
  // For each of the other hosts whose ranks have ended: the number of operations that these ranks
  // had begun, by the hash of the operation's name.
  std::vector<std::optional<std::unordered_map<uint64_t, uint64_t>>> ends_;
  std::vector<std::string> end_reasons_;
  // For each of the other hosts, the number of operations whose outcome the host has given to its
  // ranks, by the hash of the operation's name. None if the host hasn't sent these numbers in this
  // epoch yet.
  std::vector<std::optional<std::unordered_map<uint64_t, uint64_t>>> given_;

  std::deque<std::pair<Ending, std::vector<uint64_t>>> said_;  // only the dispatcher uses this
  std::thread dispatcher_;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_TRANSPORT_H_
