// The inter-host transport: one host's contribution to the operations of several hosts. It runs in
// the host's launcher.
//
// The text below is the argument that every operation ends alike at all ranks. The invariants are
// numbered, and other files refer to the numbers. Each names the tests that cover it (tests/cpp);
// tests/unit/test_invariants.py checks that these exist. Terms:
//
// Generation g of the cluster is all ranks but the first g failed ones. The control block orders
// the failures, in the same way on all hosts. Each host also orders the failures of its own ranks,
// in the same order: its launcher enters a failure into the control block first, and into the
// segment of its host next.
//
// An epoch is the time between two losses of hosts. A transport counts the epochs.
//
// Course of an operation
//
// A transport is the last member of its host's segment. A rank notifies its transport of each
// operation that it begins (Request). Then the ranks of the host and the transport run these
// operations, by the collectives of one host (host_communicator.h):
//
// "Reduce-to-host" brings the ranks' contributions to the transport, reduced or one after another.
// "Commit" broadcasts the transport's decision, after the transport has the headers of all other
// hosts. "Broadcast" brings the result to the ranks. If all members pin the staging buffer of
// reduce-to-host (Pinned), the ranks read the result there instead. A result of few bytes comes
// with the commit.
//
// Between reduce-to-host and commit the transports exchange headers, which say what each host has
// (Header). Then they exchange the data (algorithm.h). The k-th operation of a name on one host
// meets the k-th on every other host. A large all-reduce is several operations, its slices. They
// run side by side on tracks, and each track counts like a name of its own (slices.h).
//
// Failures of ranks
//
// 1. A reduce-to-host ends without the first i failed ranks of its host, with the same i at all its
// members, or it doesn't end (failure_rules.cc). The transport is a member and doesn't fail without
// its host. So what a host brings has one meaning: the number i, and the contributions of the other
// ranks.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverOneFails
// Test: ClusterFailures.SurvivorsOfAllHostsComeToTheSameEnd
//
// 2. A header carries i. A host's contribution fits generation g if exactly i of the first g failed
// ranks are on that host. Every transport has all headers, hence computes the same generation G:
// the earliest one that is late enough for all contributions. If a host has more failures in G than
// its contribution leaves out, its ranks contribute again without them. The other hosts keep
// theirs. Then the transports send headers once more. Each round has a later G, so the rounds are
// at most as many as the failures.
// Test: ClusterFailures.SurvivorsOfAllHostsComeToTheSameEnd
// Test: Cluster.FewBytesAreBroughtAgainWithoutFailedRanks
//
// 3. The transports combine the contributions only if all of them fit G. From then on a failure of
// a rank changes nothing, because the transports hold what the rank brought. So an operation ends
// in G at every rank that lives until its end.
// Test: ClusterFailures.SurvivorsOfAllHostsComeToTheSameEnd
//
// 4. An operation with planes depends on which ranks contribute. All hosts contribute again in G.
// Test: ShardsFailures.AStepIsWholeWhereverOneFails
// Test: ShardsStep.IsWholeWithoutARankThatStopsInTheMiddle
//
// 5. A host may learn of a failure later than another host, whose header already counts it. A
// transport or rank that needs the failure waits until the control block of its host has it.
// Test: ClusterFailures.SurvivorsOfAllHostsComeToTheSameEnd
//
// 6. If no rank of a host lives, the host begins no more operations, and none of its ranks can
// notify the other hosts. Its transport sends them once how many operations of each name its ranks
// had begun (Ending). The host contributes to these, and to no later one.
// Test: ClusterEnds.FailureAfterTheEndOfItsRanksReachesTheOthers
// Test: Cluster.FewBytesAreThoseOfHostsWithRanks
//
// If something fails that not all ranks share, or if the members don't go on after a failure, the
// communicator ends on all hosts. The transport notifies the other transports, and gives up in its
// own segment, which ends all waits of its ranks. A transport in a later epoch drops that message.
// The job's controller learns of the failure from the launcher of the failed transport, and ends
// the wait there.
// Test: ClusterFailures.WithoutRecoveryAllFail
// Test: ClusterEnds.RankThatGivesUpEndsTheWaitsOnOtherHosts
//
// Losses of hosts
//
// If the members go on after failures, a transport whose connection to a host has ended waits. The
// job's controller decides which hosts are lost. It notifies the transports of all other hosts
// (LoseHost), of the same hosts in the same order, after the control block has all ranks of the
// lost host. Each loss begins an epoch: it cancels what is under way between hosts (Mesh::Cancel),
// and the transports agree anew on the outcome of each operation.
//
// 7. A transport gives its ranks a result, or a failure that all hosts share, only after it knows
// that all hosts have it. After the exchange the transports say so in one more round (Acknowledge),
// in the epoch in which they got the result. To have a result is a promise: to keep it, and to give
// it if the others have it, until a new epoch says otherwise. A failure among the ranks of one host
// needs no promise: they know of it, and no other host has to if that host is lost.
// Test: HostLoss.ALostHostContributesToASumForAllOrNone
// Test: HostLoss.ABroadcastFromALostHostIsHadByAllOrNone
//
// 8. In a new epoch an operation begins again with headers. They say in which epoch the host got
// what it has, if it has anything. If all hosts have the same, they give it. Otherwise no host has
// given it, by 7, and none will. All transports drop what they have and go on with their ranks'
// contributions, which they keep until the result is given. The ranks of the lost host have failed,
// so G is a generation without them.
// Test: HostLoss.ALostHostContributesToASumForAllOrNone
// Test: HostLoss.ALostHostContributesToASumOfSlicesForAllOrNone
//
// 9. A host that has given the result of an operation has left that operation, and answers no
// question about it. So each transport begins an epoch by saying how many operations of each name
// it has given. A transport that waits for the header of such a host knows, by 7, that all hosts
// have the result. A result counts for the epoch in which it is given (Finish): a thread that comes
// too late finds itself in the next epoch.
// Test: HostLoss.ALostHostContributesToASumForAllOrNone
// Test: ClusterFailures.SurvivorsComeToTheSameEndWhereHostsAreLost
//
// 10. Two losses in a row: a transport that dropped a result in the first new epoch says so in the
// second one, or has got another result since, of a later epoch. A transport that had not finished
// the first epoch says what it had before. So "all have the same" is true when the transports
// conclude it. To give a result takes the word of all hosts in one epoch (7), so none was given
// that another host has dropped.
// Test: ClusterFailures.SurvivorsComeToTheSameEndWhereHostsAreLost
//
// 11. A broadcast may have several source ranks with the same data. All ranks name the same source
// ranks, which are in the signature. So every transport knows which hosts have one; such a host
// brings what its own source rank brings, as the root's host does. If a source rank fails before
// its host has its contribution, all ranks of that host fail (1). If its host has no ranks left,
// all transports know that, by 2 and 6. Both cases fail the operation at all ranks. The hosts
// without a source rank are assigned to those with one, by their order among the hosts that have
// ranks in G, which all transports know. The caller guarantees that the source ranks have the same
// data.
// Test: Cluster.BroadcastUsesTheSourceRankOfTheSameHost
// Test: ClusterFailures.BroadcastFromAFailedSourceFailsAndAnotherSourceServes
//
// Algorithms between hosts
//
// 12. With AUTO the algorithm of an operation is a function (SelectAlgorithm) of three things: the
// measurements in the headers of the last round, the operation's size, and whether it is a slice.
// By 2 all transports have the same headers, so they choose the same algorithm. A transport reads
// its own measurements once a round, when it makes its header; a later change counts for the next
// operation. An operation that is done again, in a later generation or epoch, has new headers. Its
// earlier result was given to no rank (8).
// Test: Cluster.AllHostsTakeTheAlgorithmThatOneOfThemHasMeasured
// Test: HostsAuto.ChangesOverByWhatWasMeasuredAndByTheNumberOfHosts
//
// 13. With AUTO few bytes travel in the headers. When all contributions fit G, each transport adds
// up all of them by itself, in the order of recursive doubling, and waits for no other host. To
// keep the measurements fresh, the first of each kMeasuredEvery operations of a name runs the
// selected algorithm, and so do all operations as long as one host has no measurement. By 12 all
// transports know alike which operations these are.
// Test: Cluster.FewBytesGoWithTheHostsWords
// Test: HostLoss.ALostHostContributesToASumOfFewBytesForAllOrNone
//
// Deadlocks
//
// A rank in reduce-to-host waits for ranks of its host and for the transport. The transport waits,
// in the operation's own thread, for these ranks and for the headers of the same operation. There
// are as many threads as operations under way, so no operation waits for the thread of another one.
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

#include "collectives/host/host_communicator.h"
#include "collectives/hosts/meter.h"
#include "collectives/hosts/protocol.h"
#include "collectives/hosts/selector.h"
#include "transport/shm/segment_control_block.h"
#include "transport/tcp/mesh.h"

namespace kungfu::hosts {

struct Scratch;
class ScratchPool;

// Thread-safe. For one cluster version.
class Transport {
 public:
  // `local` has the ranks of `host` and one more; `control_segment` all ranks. `ends`: the connections to the other
  // hosts, which are in the order of `places`. `strategy` is the same at all of them.
  Transport(const std::shared_ptr<shm::Segment>& local, const std::shared_ptr<shm::Segment>& control_segment,
            Places places, uint32_t host, std::vector<tcp::HostEnds> ends, Strategy strategy = Strategy::kAuto);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  // A socket by which a process that is to be this rank of the segment says what it begins. The caller closes it.
  int Connect(uint32_t local_rank);
  // The members go on without this host, all of whose ranks have failed in the control blocks of all hosts. All
  // transports are notified of the same hosts in the same order.
  void LoseHost(uint32_t host);
  // Hosts to which a connection has ended, and how; but for those that LoseHost was called for.
  std::vector<std::pair<uint32_t, std::string>> Unreachable() const;
  // Whatever is under way here, or begins, fails with that, here and on the other hosts. The first reason stays.
  void Fail(kf_status status, const std::string& text);
  Meter& meter() { return meter_; }
  // Memory that operations have used and none has.
  size_t idle_bytes() const;
  // Why it has failed; empty: it hasn't.
  std::string failure() const;
  // Ends all. No rank of the host is to be in an operation any more.
  void Close();

 private:
  struct Header;
  struct Ending;
  // A name, and what this host's ranks do under it. It is never forgotten: all hosts have to go on counting alike.
  struct Name {
    std::string name;
    uint8_t track = 0;
    uint64_t hash = 0;            // of both (KeyOf), which is what hosts call it
    std::vector<uint64_t> asked;  // by rank: how many it has begun
    uint64_t begun = 0;           // the number of the one that runs, or ran last
    uint64_t given = 0;           // of the last whose outcome its ranks got, or are about to get
    uint64_t let_on = 0;          // of the last whose ranks got kMore; its thread's
    bool runs = false;
    std::vector<uint32_t> awaited;  // hosts that the running one has waited for at its last look
    std::deque<Request> waiting;    // for the one before them
    // With planes: (number of the operation, generation) -> how it is brought there.
    std::map<std::pair<uint64_t, uint32_t>, Request> renewals;
  };
  class Renewal;
  // What an operation has got from its host's ranks.
  struct Contribution {
    uint32_t missing = 0;     // failed ranks of this host
    uint32_t generation = 0;  // the earliest of the cluster's that it fits
    uint64_t weight = 0;
    HostCommunicator::Pinned pinned;
    // All its ranks have failed, with this, and know it.
    bool failed = false;
    kf_status status = KF_OK;
    std::string text;
  };

  // What came of an operation, when it is known.
  struct Outcome {
    uint64_t epoch = 0;  // in which it was got; 0: it isn't known
    Commit commit;
    std::string text;  // of a failure
  };
  struct Talk;
  // What hosts send each other for one operation. Each kind has tags of its own.
  enum class Message : uint8_t { kData, kHeader, kAcknowledgement };
  // Where an operation is between hosts, for as long as one epoch lasts.
  struct Place {
    Name& name;
    const Request& request;
    uint64_t number;
    uint64_t epoch;
    uint64_t attempt = 0;

    tcp::Tag TagOf(Message message) const;
  };

  // ---- transport.cc: requests, threads, the end
  void Serve();
  void Hear(uint32_t local_rank, int fd);
  void Answer(int fd, const Request& question) const;
  void Begin(uint32_t local_rank, Request request);
  void Work();
  void BeginTalks(std::vector<Talk>& talks, uint64_t epoch);
  void HearEnds(std::vector<Talk>& talks, uint64_t epoch);
  void Say(std::vector<Talk>& talks, Ending ending, uint64_t epoch, uint64_t step);
  bool HasFailed(Ending& ending) const;
  bool IsOver(Ending& ending);
  bool IsLost(uint32_t host) const;
  std::string OwnTrouble(const std::exception& error) const;
  void Wake() const;
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
  void AwaitHost(const tcp::Mesh::Ticket& heard, const tcp::Mesh::Ticket& said, const Look& look) const;
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
  const uint32_t self_;  // in the segment
  const Strategy strategy_;
  shm::SegmentControlBlock control_, local_control_;
  tcp::Mesh mesh_;
  mutable Meter meter_;  // has a lock of its own
  const std::unique_ptr<HostCommunicator> local_;
  const std::unique_ptr<ScratchPool> scratches_;
  int epoll_ = -1, wake_ = -1;

  std::mutex losing_;  // epochs begin one after another
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // something that operations under way look at
  std::condition_variable begins_;   // an operation, or the end
  // All guarded by mutex_:
  std::unordered_map<std::string, std::unique_ptr<Name>> names_;
  std::deque<Name*> ready_;  // to be run
  std::vector<std::thread> workers_;
  uint32_t idle_ = 0;
  std::vector<std::pair<uint32_t, int>> heard_;  // ranks, and the sockets by which they speak
  uint64_t epoch_;
  std::vector<bool> lost_;                // hosts that LoseHost was called for
  std::vector<std::string> unreachable_;  // how the connection to a host has ended
  std::optional<Error> failed_;
  bool closing_ = false;
  bool begins_nothing_ = false;  // this host's end is said, or about to be
  // Of the other hosts, what they have said of their end: by the name's hash, how many they had begun.
  std::vector<std::optional<std::unordered_map<uint64_t, uint64_t>>> ends_;
  std::vector<std::string> end_reasons_;
  // Of the other hosts, in this epoch: by the name's hash, how many they have given; none: they haven't said
  // yet.
  std::vector<std::optional<std::unordered_map<uint64_t, uint64_t>>> given_;

  std::deque<std::pair<Ending, std::vector<uint64_t>>> said_;  // the dispatcher's
  std::thread dispatcher_;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_TRANSPORT_H_
