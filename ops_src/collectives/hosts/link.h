// A host's part in what the ranks of several hosts do together, in its launcher's process.
//
// How an operation goes. A link is one more member of its host's segment, the last. A rank says to it what it begins
// (Request), and then all ranks of the host and the link do, by the host's own collectives (host_communicator.h):
//
//   up        the ranks' parts, reduced or one after another, to the link;
//   verdict   a broadcast of the link's word, when it has heard of all other hosts;
//   result    a broadcast of what came out; or, where up's lane is kept (Kept), the ranks read it there; few bytes come
//             with the verdict.
//
// Between up and verdict the links tell each other what they have (Header), and then exchange it (operations.h). The
// k-th operation under a name at one host meets the k-th at every other. A large all-reduce is several operations, its
// slices, which go side by side under names of their own (slices.h).
//
// Deaths. *Generation* g of the cluster are all ranks but the first g dead, in the order that the board has, the same
// on all hosts. Each host also has the order of its own dead, which is the same order: launchers enter a death in the
// board first, and in the segment of its host next.
//
//  1. An up ends without the first i dead of its host, the same i at all its members, or it doesn't end
//  (failure_rules.cc);
//     the link is a member and never dies without its host. So what a host brings has one meaning: (i, what is in it).
//  2. Header says i. What was brought fits generation g of the cluster if the host has just i dead among the first g.
//     Everybody has all headers, hence the same G: the earliest generation that is late enough for all of them. A host
//     of which more are dead in G than are missing in its part has its ranks bring it again without them, all others
//     keep theirs; then headers go once more. Each such round has a later G, so there are as many as deaths.
//  3. Only when all parts fit G anything is made of them, and from then on no rank's death matters: what they brought
//     is at the links. So an operation ends in G at every rank of every host that lives to hear it.
//  4. An operation with planes depends on who takes part: there all hosts bring it again in G.
//  5. A rank that isn't told in time what the others know: the board of its host may not have heard yet of a death that
//     another host's header tells of. Whoever needs it waits for the board.
//  6. A host without living ranks begins nothing more, and nobody could tell the others. Its link does, once: how many
//     operations of each name its ranks had begun (Ending). Those go on as above, and in all later ones it has no part.
//
// Where something fails that isn't everybody's, or the members don't go on without the dead, the communicator ends
// everywhere: a link says so to all others, and gives up in its own segment, which ends all waits of its ranks. Who is
// in a later epoch already drops that word: there the job's coordinator, which hears of it from this link's launcher,
// ends the wait.
//
// The loss of a host, where the members go on. A link whose connection to a host has ended waits; somebody (the job's
// coordinator) decides who is out, and says so to the links of all others, the same hosts in the same order
// (LoseHost), when all ranks of that host are in the board. Each loss begins an *epoch*: whatever was under way between
// hosts is over (Mesh::Cancel), and what operations had come to is agreed on anew.
//
//  7. A result, or a failure that all share, is given to ranks only when all hosts are known to *have* it: after the
//  exchange
//     they tell each other so in one more round (Acknowledge), in the epoch in which they got it. Having it is a
//     promise: to keep it, and to give it if the others have it, until an epoch says otherwise.
//     (What fails among a host's own ranks they know at once; should that host be lost, nobody has to hear of it.)
//  8. In a new epoch an operation begins again with headers, which say in which epoch the host got what it has, if it
//     has anything. Where all have the same, they give it. Else nobody has given it, by 7, nor ever will: all drop what
//     they have and go on with what their ranks brought, which is kept until then; the lost host's ranks are dead, so G
//     is one without them.
//  9. A host that has given an operation's result is in it no more, and can't be asked. So each link begins an epoch by
//     saying how many operations of each name it has given: who waits for such a host's header knows, by 7, that all
//     have the result. What is given in an epoch is counted there (Finish): a thread that comes too late finds itself
//     in the next.
// 10. Two losses in a row: whoever dropped a result in the first of the new epochs says so in the second, or has got
//     another since, of a later epoch; who wasn't through with the first says what it had before. So "all have the
//     same" means what it says, and since it takes all hosts' word in one epoch to give a result (7), none was given
//     that somebody has dropped.
//
// 11. A broadcast may have several givers, which bring the same. All ranks name the same ones (they are in the
//     signature), so everybody knows alike which hosts have one, and takes from its own: the part of such a host is
//     what its giver brings, as at the root's host. Where a giver dies before its host has its part, that host's ranks
//     have all failed (1); where its host has no ranks any more, all know that by 2 and 6. Either fails the operation
//     at all ranks. The hosts without a giver are dealt to those with one by their order among those that have ranks
//     in G, which all know alike. That what they bring is the same is for the caller to know.
//
// The way between hosts.
//
// 12. With AUTO the way of an operation is a function (WayOf) of what its members' headers of the last round say that
// they
//     have measured, of its size, and of whether it is a slice. By 2 all members have the same headers of each other,
//     so they go the same way. Each reads its own figures once a round, as it makes its header; that they change
//     meanwhile is for the next operation. One that is done again, in a later generation or epoch, has new headers;
//     what it came to before was given to nobody (8).
//
// 13. With AUTO few bytes go with the headers, and when all parts fit G each host adds up all of them by itself, as
//     recursive doubling would: no host waits for another once more. So that a step is still measured, the first of
//     each kLongWayEvery operations of a name goes the long way, as do all as long as a host has measured none.
//     Everybody knows these things alike, by 12.
//
// Waiting in a circle. A rank in `up` waits for ranks of its host and the link, the link in its operation's thread for
// them and the other links' headers of the same operation. Operations have threads of their own, as many as are under
// way, so that none waits for another's.
#ifndef KUNGFU_COLLECTIVES_HOSTS_LINK_H_
#define KUNGFU_COLLECTIVES_HOSTS_LINK_H_

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
#include "collectives/hosts/strategy.h"
#include "transport/shm/board.h"
#include "transport/tcp/mesh.h"

namespace kungfu::hosts {

struct Scratch;
class ScratchPool;

// Thread-safe. For one cluster version.
class Link {
 public:
  // `local` has the ranks of `host` and one more; `everybody` all ranks. `ends`: the connections to the other hosts,
  // which are in the order of `places`. `strategy` is the same at all of them.
  Link(const std::shared_ptr<shm::Segment>& local, const std::shared_ptr<shm::Segment>& everybody, Places places,
       uint32_t host, std::vector<tcp::HostEnds> ends, Strategy strategy = Strategy::kAuto);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // A socket by which a process that is to be this rank of the segment says what it begins. The caller closes it.
  int Connect(uint32_t local_rank);
  // The members go on without this host, all of whose ranks are dead in the boards of all hosts. All links are told of
  // the same hosts in the same order.
  void LoseHost(uint32_t host);
  // Hosts to which a connection has ended, and how; but for those that LoseHost was told of.
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
    std::vector<uint64_t> asked;  // by rank: how many it has begun
    uint64_t begun = 0;           // the number of the one that runs, or ran last
    uint64_t given = 0;           // of the last whose outcome its ranks got, or are about to get
    uint64_t let_on = 0;          // of the last whose ranks were told to bring more; its thread's
    bool runs = false;
    std::vector<uint32_t> awaited;  // hosts that the running one has waited for at its last look
    std::deque<Request> waiting;    // for the one before them
    // With planes: (number of the operation, generation) -> how it is brought there.
    std::map<std::pair<uint64_t, uint32_t>, Request> renewals;
  };
  class Renewal;
  // What an operation has got from its host's ranks.
  struct Part {
    uint32_t missing = 0;     // of this host's dead
    uint32_t generation = 0;  // the earliest of the cluster's that it fits
    uint64_t weight = 0;
    HostCommunicator::Kept kept;
    // All its ranks have failed, with this, and know it.
    bool failed = false;
    kf_status status = KF_OK;
    std::string text;
  };

  // What came of an operation, when it is known.
  struct Outcome {
    uint64_t epoch = 0;  // in which it was got; 0: it isn't known
    Verdict verdict;
    std::string text;  // of a failure
  };
  struct Talk;
  // Where an operation is between hosts, for as long as one epoch lasts.
  struct Place {
    Name& name;
    const Request& request;
    uint64_t number;
    uint64_t epoch;
    uint64_t attempt = 0;
  };

  // ---- link.cc: requests, threads, the end
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

  // ---- link_operation.cc: one operation
  void Run(Name& name, const Request& request, uint64_t number);
  void RunOrThrow(Name& name, const Request& request, uint64_t number, Scratch& scratch);
  bool Agree(Place& place, Part& part, bool& brought, Outcome& outcome, Scratch& scratch);
  void AwaitEpochAfter(uint64_t epoch) const;
  uint64_t Epoch() const;
  bool Finish(Name& name, uint64_t number, uint64_t epoch);
  void Acknowledge(const Place& place, uint64_t got);
  Part BringUp(const Name& name, const Request& request, uint64_t number, uint32_t generation, Scratch& scratch);
  const Request* RenewalOf(const Name& name, uint64_t number, uint32_t generation);
  std::vector<Header> Meet(Place& place, const Header& mine);
  template <typename Words, typename Absent>
  void Trade(const Place& place, const tcp::Tag& tag, const Words& mine, std::vector<Words>& theirs,
             const Absent& absent);
  template <typename Look>
  void AwaitHost(const tcp::Mesh::Ticket& heard, const tcp::Mesh::Ticket& said, const Look& look) const;
  static void LookWhileWaiting();
  std::optional<std::pair<Verdict, std::string>> VerdictOn(const Name& name, const Request& request,
                                                           const std::vector<Header>& headers) const;
  void Exchange(const Place& place, uint32_t generation, const Part& part, const std::vector<Header>& headers,
                Scratch& scratch);
  const void* Scaled(const Request& request, uint32_t generation, const std::vector<Header>& headers, uint32_t host,
                     const char* part, char* scaled) const;
  void ReduceSmall(const Place& place, uint32_t generation, const Members& members, const std::vector<Header>& headers,
                   Scratch& scratch) const;
  void ExchangeRows(const Place& place, const tcp::Tag& tag, uint32_t generation, Scratch& scratch);
  void ExchangeCopy(const Place& place, const tcp::Tag& tag, uint32_t generation, const std::vector<Header>& headers,
                    Scratch& scratch);
  void ExchangePlanes(const Place& place, const tcp::Tag& tag, uint32_t generation, Scratch& scratch);
  void Give(const Name& name, const Request& request, const Verdict& verdict, const std::string& text,
            const Scratch& scratch);
  void GiveResult(const Name& name, const Request& request, const Scratch& scratch);
  std::optional<uint32_t> GiverOn(uint32_t host, const Request& request) const;
  bool HasRanks(uint32_t host, uint32_t generation) const;
  Members LivingIn(uint32_t generation) const;
  void AwaitDeaths(uint32_t deaths) const;
  uint32_t AwaitLocalDeaths(uint32_t generation) const;
  uint32_t AwaitGenerationWithout(uint32_t host, uint32_t missing) const;
  uint32_t AwaitGenerationWithout(uint32_t missing) const { return AwaitGenerationWithout(host_, missing); }
  std::optional<uint32_t> FinishedOn(uint32_t host) const;
  void Pause() const;

  const Places places_;
  const uint32_t host_;
  const uint32_t self_;  // in the segment
  const Strategy strategy_;
  shm::Board board_, local_board_;
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
  std::vector<bool> lost_;                // hosts that LoseHost was told of
  std::vector<std::string> unreachable_;  // how the connection to a host has ended
  std::optional<Error> failed_;
  bool closing_ = false;
  bool begins_nothing_ = false;  // this host's end is said, or about to be
  // Of the other hosts, what they have said of their end: by hash of the name, how many they had begun.
  std::vector<std::optional<std::unordered_map<uint64_t, uint64_t>>> ends_;
  std::vector<std::string> end_reasons_;
  // Of the other hosts, in this epoch: by hash of the name, how many they have given; none: they haven't said yet.
  std::vector<std::optional<std::unordered_map<uint64_t, uint64_t>>> given_;

  std::deque<std::pair<Ending, std::vector<uint64_t>>> said_;  // the dispatcher's
  std::thread dispatcher_;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_LINK_H_
