// The models of other hosts' workers, as one worker reaches them in one cluster version: by its host's model transport.
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

// Thread-safe. Parcels are kept for the next request of as many bytes.
class OtherHosts {
 public:
  // `transport`: ModelTransport::Connect's, which stays the caller's. `timeout` is that of a request.
  OtherHosts(int transport, hosts::Places places, uint32_t rank, std::chrono::milliseconds timeout);
  ~OtherHosts();
  OtherHosts(const OtherHosts&) = delete;
  OtherHosts& operator=(const OtherHosts&) = delete;

  bool Have(uint32_t rank) const { return rank < places_.ranks() && places_.HostOf(rank) != host_; }
  // Of a rank that they have. It is asked again each time, except for OwnerLives, which is true: a worker that has
  // ended has no models. Besides what ModelView throws: StaleClusterError when the cluster version is over,
  // CollectiveTimeoutError, and what the thread's InterruptCheck throws.
  static std::shared_ptr<ModelView> ViewOf(const std::shared_ptr<OtherHosts>& self, uint32_t rank);
  // The cluster version is over: all waits end.
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
  // Guarded by mutex_:
  std::vector<std::unique_ptr<Parcel>> kept_;
  uint32_t asks_ = 0;
  std::map<uint32_t, Refusal> refusals_;  // that another thread has read for the thread that asked
};

}  // namespace kungfu::store

#endif  // KUNGFU_STORE_OTHER_HOSTS_H_
