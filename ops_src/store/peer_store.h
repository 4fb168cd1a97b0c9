// The model store of this process, and access to the model stores of other workers.
#ifndef KUNGFU_STORE_PEER_STORE_H_
#define KUNGFU_STORE_PEER_STORE_H_

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "store/model_store.h"
#include "store/other_hosts.h"

namespace kungfu::store {

// This process's rank and the size of the cluster, in one cluster version.
struct Position {
  uint64_t cluster_version;
  uint32_t rank, size;
};

struct Source {
  int64_t rank = -1;     // -1 if no rank had a model
  uint64_t version = 0;  // the version of that rank's model, or 0 if no rank had a model
};

// Chooses one of the other ranks. Not thread-safe.
class NeighbourChoice {
 public:
  NeighbourChoice(kf_neighbour kind, uint64_t seed) : kind_(kind), random_(seed) {}
  // Returns one of the other ranks for which `take` returns true, or -1 if there is no such rank.
  // With KF_RANDOM, all such ranks are equally likely. With KF_ROUND_ROBIN, they take turns. `take`
  // is called at most once for each rank.
  int64_t Choose(uint32_t rank, uint32_t size, const std::function<bool(uint32_t)>& take);
  // Undoes the turns of the last `count` ranks that were passed to `take`, so that these ranks get
  // their turns again.
  void PutBack(uint64_t count) { turn_ -= kind_ == KF_ROUND_ROBIN ? count : 0; }

 private:
  const kf_neighbour kind_;
  std::mt19937_64 random_;
  uint64_t turn_ = 0;
};

// Fetches a neighbour's latest model into its own memory, on its own thread. Only one caller at a
// time may use it.
class Exchange {
 public:
  // Returns the view of a rank's models in the current cluster, or null if the rank has no view
  // yet. If a rank is on another host, only a request shows whether it has a model.
  using Views = std::function<std::shared_ptr<ModelView>(uint32_t rank)>;

  Exchange(std::string name, kf_neighbour kind, uint64_t seed);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Chooses a neighbour, and begins to fetch its model in the background. Drops a model that was
  // fetched earlier.
  void Begin(const Position& here, const Views& views, const std::string& layout, const std::vector<uint64_t>& sizes);
  // Waits for the model that Begin fetches, and copies it into the blobs. If no fetch has begun in
  // this cluster version, begins a fetch. If no rank has a model, the blobs stay unchanged.
  Source Take(const Position& here, const Views& views, const std::string& layout, const kf_blob* blobs,
              size_t num_blobs);

 private:
  void Serve();
  void AwaitIdle(std::unique_lock<std::mutex>& lock);

  const std::string name_;
  NeighbourChoice choice_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // `mutex_` guards these members. The exception: while `busy_` is true, the buffer and the source
  // belong to the thread.
  bool busy_ = false;
  bool stop_ = false;
  // The ranks from which the thread requests the model, one after another, until one of them has a
  // model. All ranks except the last are on other hosts, so it isn't known whether they have a
  // model.
  std::vector<std::pair<uint32_t, std::shared_ptr<ModelView>>> from_;
  std::string layout_;
  std::vector<std::vector<char>> buffer_;
  Source source_;
  std::optional<uint64_t> begun_in_;  // the cluster version of the current fetch, until its model is taken
  std::thread thread_;                // started with the first fetch
};

// This process's access to all model stores of its cluster. Thread-safe.
class PeerStore {
 public:
  // Publishes this process's store to the other workers. The argument is the store's descriptor,
  // which the store still owns.
  using Announce = std::function<void(int fd)>;
  // Returns a descriptor of the store of rank `rank` in the current cluster, or -1 if the rank has
  // no store yet. The caller owns the descriptor.
  using Find = std::function<int(uint32_t rank)>;

  // `here` may have to join the cluster first, so it is called only if other ranks are needed.
  explicit PeerStore(std::function<Position()> here) : here_(std::move(here)) {}

  // Allows this process to read other hosts' models in a cluster version that is about to begin.
  void AddOtherHosts(uint64_t cluster_version, std::shared_ptr<OtherHosts> others);
  // For every version except `cluster_version`, stops this process from reading other hosts'
  // models. Call it when this version has begun, or when a later version could not begin.
  void KeepOtherHosts(uint64_t cluster_version);

  // Sets the two functions. Without them, only this process can use the store.
  void SetHandlers(Announce announce, Find find);
  // Drops all saved models and all known ranks.
  void Reset();

  uint64_t Save(const std::string& name, const std::string& layout, const kf_blob* blobs, size_t num_blobs);
  // These functions do the same as those of ModelView. A rank whose process has ended has no
  // models. `rank` may be this process's own rank. Throws ValueError if the rank isn't in the
  // cluster. For a rank on another host, also throws the errors of OtherHosts.
  Description Describe(uint32_t rank, const std::string& name);
  uint64_t Request(uint32_t rank, const std::string& name, const std::string& layout, const kf_blob* blobs,
                   size_t num_blobs);
  // Copies a running neighbour's latest model under `name`. With `ahead`, copies the model that was
  // the latest one when this process last saved under `name`.
  Source RequestNeighbour(const std::string& name, const std::string& layout, const kf_blob* blobs, size_t num_blobs,
                          kf_neighbour kind, uint64_t seed, bool ahead);

 private:
  struct Ahead {
    std::unique_ptr<Exchange> exchange;
    std::string layout;
    std::vector<uint64_t> sizes;
    bool ahead = false;
    std::mutex mutex;  // held by the caller that uses this object; only one caller may use it at a time
  };
  std::shared_ptr<ModelStore> OwnStore();
  std::shared_ptr<ModelView> ViewOf(uint64_t cluster_version, uint32_t rank, uint32_t own_rank);
  std::shared_ptr<ModelView> LivingViewOf(uint32_t rank);
  Exchange::Views Others(const Position& here, const std::string& name);

  const std::function<Position()> here_;
  const OneProcess process_;
  std::mutex mutex_;
  Announce announce_;                                            // guarded by mutex_
  Find find_;                                                    // guarded by mutex_
  std::shared_ptr<ModelStore> own_;                              // guarded by mutex_
  uint64_t views_of_ = 0;                                        // the cluster version of `views_`; guarded by mutex_
  std::map<uint32_t, std::shared_ptr<StoreView>> views_;         // by rank; guarded by mutex_
  std::map<std::string, std::shared_ptr<Ahead>> aheads_;         // by name; guarded by mutex_
  std::map<uint64_t, std::shared_ptr<OtherHosts>> other_hosts_;  // by cluster version; guarded by mutex_
};

}  // namespace kungfu::store

#endif  // KUNGFU_STORE_PEER_STORE_H_
