// Gives one worker access to the models of workers on other hosts, until the cluster version ends.
// Requests go through the host's model transport.
#ifndef KUNGFU_STORE_OTHER_HOSTS_H_
#define KUNGFU_STORE_OTHER_HOSTS_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/hosts/protocol.h"
#include "store/model_store.h"
#include "store/parcel.h"

namespace kungfu::store {

// Thread-safe. A parcel is kept, and is reused for the next request with the same number of bytes.
class OtherHosts {
 public:
  // `transport` is a socket from ModelTransport::Connect, which the caller still owns. `timeout` is
  // the time limit of a request.
  OtherHosts(int transport, hosts::Places places, uint32_t rank, std::chrono::milliseconds timeout);
  ~OtherHosts();
  OtherHosts(const OtherHosts&) = delete;
  OtherHosts& operator=(const OtherHosts&) = delete;

  bool Have(uint32_t rank) const { return rank < places_.ranks() && places_.HostOf(rank) != host_; }
  // Returns a view of a rank for which Have() is true. Each call on the view sends a new request.
  // The exception is OwnerLives, which always returns true, because a worker that has ended has no
  // models. In addition to ModelView's errors, the view throws StaleClusterError when the cluster
  // version has ended, CollectiveTimeoutError, and the errors that the thread's InterruptCheck
  // throws.
  static std::shared_ptr<ModelView> ViewOf(const std::shared_ptr<OtherHosts>& self, uint32_t rank);
  // Ends all waits. Call it when the cluster version has ended.
  void Close() { closed_.store(true, std::memory_order_release); }

 private:
  class View;
  using Take = std::function<void(const char* tensors)>;

  Answer Fetch(Ask ask, const std::string& name, const Take& take);
  std::unique_ptr<Parcel> ParcelOf(uint64_t padded);
  void Keep(std::unique_ptr<Parcel> parcel);
  void Await(Parcel& parcel, const Ask& ask, const std::string& name);
  void Send(const Ask& ask, const Parcel& parcel) const;
  std::optional<Refusal> RefusalOf(uint32_t number);

  const hosts::Places places_;
  const uint32_t host_;
  const std::chrono::milliseconds timeout_;
  int transport_ = -1;
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  // `mutex_` guards these members:
  std::vector<std::unique_ptr<Parcel>> kept_;
  uint32_t asks_ = 0;
  std::map<uint32_t, Refusal> refusals_;  // refusals that were read by a thread other than the requesting thread
};

}  // namespace kungfu::store

#endif  // KUNGFU_STORE_OTHER_HOSTS_H_
