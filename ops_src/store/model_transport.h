// One host's contribution to reads of models between hosts, in its launcher's process.
//
// A worker sends a request to its host's model transport (parcel.h), which sends it to the
// transport of the other host. That one reads the answer from the store of the worker that has
// saved it (model_store.h), which notices nothing. Model transports have a mesh of their own, with
// connections of its own. Per request:
//
//   asking transport     ask      ->   asked transport      finds the rank's store, by a descriptor that can only read
//                   answer   <-                   version, layout; or why not
//                   tensors  <-                   if there is a version and it was asked for
//
// 1. No read is torn. The asked transport first copies the record, by the same rules as a worker of
// its host (StoreView), at the speed of memory and not of the network. While a model is on its way
// its owner may save as often as it likes. The transport sends that copy, which no thread writes.
// The asking transport reports the model when all of it has arrived. Versions never decrease: a
// request that is sent after an answer is answered by a later look.
// Test: ModelsOfOtherHosts.ReadsAreWholeAndNeverGoBack
//
// 2. Memory. The asking side has none: tensors go into the worker's parcel. It asks a host for one
// model of more than kSmallBytes at a time, and for a small one beside it, which so doesn't wait
// for a large one. The asked transport accepts no more than two requests of a host before it has
// answered one. So it keeps the copy of one model for each other host.
// Test: ModelsOfOtherHosts.NoMoreIsKeptForAHostThanTwoAnswers
//
// 3. No circle of waits. The transport's own thread never waits: it receives from workers and other
// hosts. All work that takes time runs on threads that are made as they are needed: for each other
// host two that ask and two that answer. A thread that asks waits for the other host's answer. A
// thread that answers waits for the network alone, since the other host has asked and receives.
// Test: ModelsOfOtherHosts.PausedHostIsAwaitedOnlyByItsOwnReaders
//
// 4. Failures. If the owner fails: its store is read for as long as it is known to live, by a lock
// that the kernel drops with it. Then, and if the whole host is lost (its connection has ended, or
// LoseHost says so), there is no model any more, as on one host. If the asking worker fails, its
// parcel is filled in vain. A host that doesn't answer and isn't lost is awaited up to the worker's
// deadline: the job decides that it is lost (-host-timeout). The end of the version ends all waits.
// Test: ModelsOfOtherHosts.AnOwnerThatIsKilledHasNoModelsAnyMore
// Test: ModelsOfOtherHosts.RemainingHostsReadOnIfOthersAreLost
// Test: ModelsOfOtherHosts.TheEndOfTheVersionEndsAllRequests
//
// The mesh isn't that of the collectives, though both have the same lifetime:
// - A socket's buffer holds milliseconds of a model. On connections of 40 MB/s an all-reduce of 4
//   bytes takes 0.1 ms beside a model on a connection of its own, and 12 to 22 ms if they share
//   connections; one of 1 MiB takes 24 ms, and 75 to 545. Between connections the kernel shares the
//   network.
// - A loss of a host cancels all messages of the collectives' mesh. Nothing here depends on which
//   ranks have failed. So this mesh stays in its first epoch to the end, and no model is sent
//   twice.
// - The inter-host transport measures what its connections carry, and AUTO selects an algorithm by
//   that. It would measure models too.
#ifndef KUNGFU_STORE_MODEL_TRANSPORT_H_
#define KUNGFU_STORE_MODEL_TRANSPORT_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/hosts/protocol.h"
#include "store/parcel.h"
#include "transport/tcp/mesh.h"

namespace kungfu::store {

// Thread-safe. For one cluster version.
class ModelTransport {
 public:
  // The store of a rank of this host; null: it has none (yet).
  using Find = std::function<std::shared_ptr<StoreView>(uint32_t rank)>;

  static constexpr uint64_t kSmallBytes = 32 << 10;

  // `ends`: the connections to the other hosts, which are in the order of `places`. `find` is called on threads of the
  // transport's.
  ModelTransport(hosts::Places places, uint32_t host, std::vector<tcp::HostEnds> ends, Find find);
  ~ModelTransport();
  ModelTransport(const ModelTransport&) = delete;
  ModelTransport& operator=(const ModelTransport&) = delete;

  // A socket by which a process of this host asks. The caller closes it.
  int Connect();
  // That host is lost, and no worker there has a model any more.
  void LoseHost(uint32_t host);
  // Hosts to which a connection has ended, and how; but for those that LoseHost was called for.
  std::vector<std::pair<uint32_t, std::string>> Unreachable() const;
  // Ends all. Idempotent.
  void Close();

 private:
  struct Asking {
    Ask ask;
    std::unique_ptr<Parcel> parcel;
  };
  // Another host.
  struct Far {
    // Asks of this host's workers, the small ones and the others, and whether one of each is under way.
    std::deque<Asking> waiting[2];
    bool busy[2] = {false, false};
    uint64_t asked = 0;  // how many it has been asked
    // Its own asks: the next one, and how many are being answered.
    Ask ask;
    tcp::Mesh::Ticket hearing;
    bool listens = false;
    bool over = false;  // it asks nothing more
    uint64_t heard = 0;
    uint32_t answering = 0;
    bool lost = false;
    std::string unreachable;
  };

  void Serve();
  void HearWorker(int fd);
  void HearHosts();
  void Listen(uint32_t host);
  void Pump(uint32_t host);
  void Do(std::function<void()> job);
  void Work();
  void AskHost(uint32_t host, Asking& asking, uint64_t number);
  void AnswerHost(uint32_t host, const Ask& ask, uint64_t number);
  std::shared_ptr<StoreView> ViewOf(uint32_t rank);

  const hosts::Places places_;
  const uint32_t host_;
  const Find find_;
  int epoll_ = -1, wake_ = -1;
  tcp::Mesh mesh_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // All guarded by mutex_; but a ticket of `hearing` and the ask it is for are the dispatcher's.
  std::vector<Far> hosts_;
  std::set<int> workers_;  // their sockets
  std::map<uint32_t, std::shared_ptr<StoreView>> views_;
  std::deque<std::function<void()>> jobs_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool closing_ = false;

  std::thread dispatcher_;
};

}  // namespace kungfu::store

#endif  // KUNGFU_STORE_MODEL_TRANSPORT_H_
