// The model store of this process, and access to the model stores of the other workers.
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

// The rank of this process and the size of the cluster, in this cluster version.
struct Position {
  uint64_t cluster_version;
  uint32_t rank, size;
};

struct Source {
  int64_t rank = -1;     // -1 if no rank had a model
  uint64_t version = 0;  // version of that rank's model; 0 if no rank had a model
};

// Chooses among the other ranks. Not thread-safe.
class NeighbourChoice {
 public:
  NeighbourChoice(kf_neighbour kind, uint64_t seed) : kind_(kind), random_(seed) {}
  // Returns one of the other ranks for which `take` returns true, or -1 if there is none. All such ranks are equally
  // likely (KF_RANDOM), or come in turn (KF_ROUND_ROBIN). `take` is called at most once for each rank.
  int64_t Choose(uint32_t rank, uint32_t size, const std::function<bool(uint32_t)>& take);
  // Undoes the turn of the last `count` ranks that `take` was called for, so that their turn comes again.
  void PutBack(uint64_t count) { turn_ -= kind_ == KF_ROUND_ROBIN ? count : 0; }

 private:
  const kf_neighbour kind_;
  std::mt19937_64 random_;
  uint64_t turn_ = 0;
};

// Fetches a neighbour's latest model into its own memory, on its own thread. It may have only one caller at a time.
class Exchange {
 public:
  // Returns the view of a rank's models in the current cluster, or null if it has none yet. For a rank of another host,
  // only a request shows whether it has a model.
  using Views = std::function<std::shared_ptr<ModelView>(uint32_t rank)>;

  Exchange(std::string name, kf_neighbour kind, uint64_t seed);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Chooses a neighbour and begins to fetch its model in the background. Drops an earlier fetched model.
  void Begin(const Position& here, const Views& views, const std::string& layout, const std::vector<uint64_t>& sizes);
  // Waits for the model that Begin fetches, and copies it into the blobs. If no fetch was begun in this cluster
  // version, begins one. If no rank has a model, the blobs stay unchanged.
  Source Take(const Position& here, const Views& views, const std::string& layout, const kf_blob* blobs,
              size_t num_blobs);

 private:
  void Serve();
  void AwaitIdle(std::unique_lock<std::mutex>& lock);

  const std::string name_;
  NeighbourChoice choice_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_. While `busy_` is true, the buffer and the source belong to the thread instead.
  bool busy_ = false;
  bool stop_ = false;
  // The ranks to request the model from, one after another, until one has a model. All but the last are on other hosts,
  // so it isn't known whether they have one.
  std::vector<std::pair<uint32_t, std::shared_ptr<ModelView>>> from_;
  std::string layout_;
  std::vector<std::vector<char>> buffer_;
  Source source_;
  std::optional<uint64_t> begun_in_;  // cluster version of a fetch that was begun and not taken
  std::thread thread_;                // started with the first fetch
};

// Thread-safe.
class PeerStore {
 public:
  // Publishes this process's store to the other workers. Its argument is the descriptor, which the store keeps.
  using Announce = std::function<void(int fd)>;
  // Returns a descriptor of the store of rank `rank` in the current cluster, or -1 if it has none yet. The caller owns
  // it.
  using Find = std::function<int(uint32_t rank)>;

  // `here` may have to join the cluster first. So it is called only when other ranks are needed.
  explicit PeerStore(std::function<Position()> here) : here_(std::move(here)) {}

  // Sets the access to other hosts' models in a cluster version that is about to begin.
  void AddOtherHosts(uint64_t cluster_version, std::shared_ptr<OtherHosts> others);
  // Drops the access to other hosts' models of all versions except `cluster_version`: this version has begun, or a
  // later one could not begin.
  void KeepOtherHosts(uint64_t cluster_version);

  // Without handlers, only this process can use the store.
  void SetHandlers(Announce announce, Find find);
  // Forgets all saved models and all known ranks.
  void Reset();

  uint64_t Save(const std::string& name, const std::string& layout, const kf_blob* blobs, size_t num_blobs);
  // Like ModelView. A rank whose process has ended has no models. `rank` may be this process's own rank. Throws
  // ValueError if the rank isn't in the cluster. For a rank on another host, also throws OtherHosts's errors.
  Description Describe(uint32_t rank, const std::string& name);
  uint64_t Request(uint32_t rank, const std::string& name, const std::string& layout, const kf_blob* blobs,
                   size_t num_blobs);
  // Copies the latest model under `name` of a living neighbour that has one. With `ahead`, it is the neighbour's latest
  // model at this process's last save under that name.
  Source RequestNeighbour(const std::string& name, const std::string& layout, const kf_blob* blobs, size_t num_blobs,
                          kf_neighbour kind, uint64_t seed, bool ahead);

 private:
  struct Ahead {
    std::unique_ptr<Exchange> exchange;
    std::string layout;
    std::vector<uint64_t> sizes;
    bool ahead = false;
    std::mutex mutex;  // only one caller at a time
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
  uint64_t views_of_ = 0;                                        // cluster version; guarded by mutex_
  std::map<uint32_t, std::shared_ptr<StoreView>> views_;         // by rank; guarded by mutex_
  std::map<std::string, std::shared_ptr<Ahead>> aheads_;         // by name; guarded by mutex_
  std::map<uint64_t, std::shared_ptr<OtherHosts>> other_hosts_;  // by cluster version; guarded by mutex_
};

}  // namespace kungfu::store

#endif  // KUNGFU_STORE_PEER_STORE_H_
