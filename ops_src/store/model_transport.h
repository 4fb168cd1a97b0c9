// Transfers models between one host and the other hosts. Runs in the launcher's process.
//
// A worker sends a request to its own host's model transport (parcel.h), which forwards the request
// to the model transport of the other host. The other transport reads the model from the store of
// the worker that saved the model (model_store.h), without involving that worker. Model transports
// have a separate mesh with separate connections. The messages of a request are:
//
//   requester  ask      ->  server  finds the store by a read-only descriptor
//              answer   <-          version and layout, or why there is no model
//              tensors  <-          only if a model was requested and there is a version
//
// 1. No read is torn. The server first copies the record, by the same rules as a worker on its host
// (StoreView). The copy runs at the speed of memory, not of the network. The server sends this
// copy, so the owner may save while the model is being sent. The requester reports the model when
// the whole model has arrived. Versions never decrease: a request that is sent after an answer has
// arrived reads the record at a later time.
// Test: ModelsOfOtherHosts.ReadsAreWholeAndNeverGoBack
//
// 2. Memory. The requester allocates no memory, because tensors go directly into the worker's
// parcel. At any time, the requester requests from each host at most one model of more than
// kSmallBytes, and one smaller model. So a small model doesn't wait for a large one. The server
// accepts at most two unanswered requests from each host. So for every other host it keeps the copy
// of at most one large model.
// Test: ModelsOfOtherHosts.NoMoreIsKeptForAHostThanTwoAnswers
//
// 3. No circular wait. The transport's own thread never waits: it receives from workers and other
// hosts. All work that takes time runs on other threads, which are started when they are needed.
// For every other host, two threads send requests and two threads answer requests. A requesting
// thread waits for the other host's answer. An answering thread waits only for the network, because
// the other host is already receiving.
// Test: ModelsOfOtherHosts.PausedHostIsAwaitedOnlyByItsOwnReaders
//
// 4. Failures.
// - If the owner fails, its models no longer exist, as on a single host. A lock shows whether the
//   owner is running, because the kernel drops the lock when the owner ends.
// - If the whole host is lost (its connection has ended, or LoseHost was called), its models are
//   lost too.
// - If the requesting worker fails, its parcel is still filled, but no process reads it.
// - If a host doesn't answer and isn't lost, the worker waits until its deadline. The job decides
//   when a host is lost (-host-timeout).
// - The end of the cluster version ends all waits.
// Test: ModelsOfOtherHosts.AnOwnerThatIsKilledHasNoModelsAnyMore
// Test: ModelsOfOtherHosts.RemainingHostsReadOnIfOthersAreLost
// Test: ModelsOfOtherHosts.TheEndOfTheVersionEndsAllRequests
//
// The mesh for collectives has the same lifetime, but models use a separate mesh for these reasons:
// - A socket's buffer holds as much of a model as the network sends in several milliseconds. If the
//   connections are separate, the kernel shares the network between them. During the transfer of a
//   model at 40 MB/s, an all-reduce of 4 bytes takes 0.1 ms with separate connections, and 12 to 22
//   ms with shared ones. An all-reduce of 1 MiB takes 24 ms with separate connections, and 75 to
//   545 ms with shared ones.
// - The loss of a host cancels all messages of the collectives' mesh. Models don't depend on which
//   ranks have failed. So the models' mesh stays in its first epoch, and no model is sent twice.
// - The inter-host transport measures the traffic on its connections, and the strategy AUTO selects
//   an algorithm by this measurement. With a shared mesh, the measurement would include models.
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

// Serves the model requests of one host in one cluster version. Thread-safe.
class ModelTransport {
 public:
  // Returns the store of a rank on this host, or null if the rank has no store yet.
  using Find = std::function<std::shared_ptr<StoreView>(uint32_t rank)>;

  static constexpr uint64_t kSmallBytes = 32 << 10;

  // `ends` contains the connections to the other hosts, in the order of `places`. The transport's
  // threads call `find`.
  ModelTransport(hosts::Places places, uint32_t host, std::vector<tcp::HostEnds> ends, Find find);
  ~ModelTransport();
  ModelTransport(const ModelTransport&) = delete;
  ModelTransport& operator=(const ModelTransport&) = delete;

  // Returns a socket on which a process on this host sends requests. The caller must close the
  // socket.
  int Connect();
  // Marks the host as lost. From then on, its workers have no models.
  void LoseHost(uint32_t host);
  // Returns each host to which a connection has ended, and the reason. Omits hosts that were passed
  // to LoseHost.
  std::vector<std::pair<uint32_t, std::string>> Unreachable() const;
  // Ends all requests. A second call does nothing.
  void Close();

 private:
  struct Asking {
    Ask ask;
    std::unique_ptr<Parcel> parcel;
  };
  // What this transport knows about another host.
  struct Far {
    // Queued requests of this host's workers, and whether one of them is being sent. Index 0 is for
    // small models, and index 1 for larger models.
    std::deque<Asking> waiting[2];
    bool busy[2] = {false, false};
    uint64_t asked = 0;  // number of requests that were sent to the host
    // The next request from the host, and the number of its requests that are being answered.
    Ask ask;
    tcp::Mesh::Ticket hearing;
    bool listens = false;
    bool over = false;  // the host sends no more requests
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
  Epoll epoll_;
  Event wake_;  // declared before the mesh, whose tickets may set it
  tcp::Mesh mesh_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // `mutex_` guards these members. The exceptions are a `hearing` ticket and its `ask`, which only
  // the dispatcher uses.
  std::vector<Far> hosts_;
  std::set<int> workers_;  // the workers' sockets
  std::map<uint32_t, std::shared_ptr<StoreView>> views_;
  std::deque<std::function<void()>> jobs_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool closing_ = false;

  std::thread dispatcher_;
};

}  // namespace kungfu::store

#endif  // KUNGFU_STORE_MODEL_TRANSPORT_H_
