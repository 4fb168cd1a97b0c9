// This process's model store, and those of its peers.
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

// Where this process stands: the ranks are those of this cluster version.
struct Position {
  uint64_t cluster_version;
  uint32_t rank, size;
};

struct Source {
  int64_t rank = -1;     // -1: no rank had a model
  uint64_t version = 0;  // of that rank's model; 0 likewise
};

// Which of the other ranks is next. Not thread-safe.
class NeighbourChoice {
 public:
  NeighbourChoice(kf_neighbour kind, uint64_t seed) : kind_(kind), random_(seed) {}
  // One of the other ranks of `size`, for which `take` returns true; each of those that would is as likely as any other
  // (KF_RANDOM), or comes in turn (KF_ROUND_ROBIN). `take` is called for each rank at most once. -1: for none.
  int64_t Choose(uint32_t rank, uint32_t size, const std::function<bool(uint32_t)>& take);
  // The last `count` ranks that `take` was called for count as not having been asked: their turn comes again.
  void PutBack(uint64_t count) { turn_ -= kind_ == KF_ROUND_ROBIN ? count : 0; }

 private:
  const kf_neighbour kind_;
  std::mt19937_64 random_;
  uint64_t turn_ = 0;
};

// Fetches a neighbour's latest model into memory of its own, on a thread of its own. One caller at a time.
class Exchange {
 public:
  // The view of a rank's models in the present cluster, null if it has none (yet). Whether a rank of another host
  // has one is found out when it is fetched.
  using Views = std::function<std::shared_ptr<ModelView>(uint32_t rank)>;

  Exchange(std::string name, kf_neighbour kind, uint64_t seed);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Chooses a neighbour and begins to fetch its model in the background. What was fetched before is dropped.
  void Begin(const Position& here, const Views& views, const std::string& layout, const std::vector<uint64_t>& sizes);
  // The model that was begun, once it is here, into the blobs; begins and waits if there is none that belongs to
  // this cluster version. If no rank has a model the blobs stay untouched.
  Source Take(const Position& here, const Views& views, const std::string& layout, const kf_blob* blobs,
              size_t num_blobs);

 private:
  void Serve();
  void AwaitIdle(std::unique_lock<std::mutex>& lock);

  const std::string name_;
  NeighbourChoice choice_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_, but while `busy_` the buffer and the source are the thread's:
  bool busy_ = false;
  bool stop_ = false;
  // Those to ask, one after another until one has a model; the last is known to have one, or none is.
  std::vector<std::pair<uint32_t, std::shared_ptr<ModelView>>> from_;
  std::string layout_;
  std::vector<std::vector<char>> buffer_;
  Source source_;
  std::optional<uint64_t> begun_in_;  // cluster version of the fetch that was begun and not taken
  std::thread thread_;                // started with the first fetch
};

// Thread-safe.
class PeerStore {
 public:
  // Makes this process's store known to the others; given the descriptor, which stays the store's.
  using Announce = std::function<void(int fd)>;
  // A descriptor of rank `rank`'s store in the present cluster, which the caller owns; -1: it has none (yet).
  using Find = std::function<int(uint32_t rank)>;

  // `here` may have to join the cluster first, so it is asked only where others are.
  explicit PeerStore(std::function<Position()> here) : here_(std::move(here)) {}

  // How models of other hosts are reached in a cluster version that is about to begin,
  void AddOtherHosts(uint64_t cluster_version, std::shared_ptr<OtherHosts> others);
  // and that `cluster_version` has begun, or nothing came of a later one: others than its are of no use any more.
  void KeepOtherHosts(uint64_t cluster_version);

  // Without them the store is for this process alone.
  void SetHandlers(Announce announce, Find find);
  // Forgets what was saved and which ranks it knows.
  void Reset();

  uint64_t Save(const std::string& name, const std::string& layout, const kf_blob* blobs, size_t num_blobs);
  // As ModelView; a rank whose process has ended has nothing. `rank` may be one's own. Throws ValueError for a rank
  // that isn't in the cluster, and of one on another host what OtherHosts throws.
  Description Describe(uint32_t rank, const std::string& name);
  uint64_t Request(uint32_t rank, const std::string& name, const std::string& layout, const kf_blob* blobs,
                   size_t num_blobs);
  // The latest model of a neighbour that lives and has one under `name`; with `ahead`, as it was when this process last
  // saved its own under that name.
  Source RequestNeighbour(const std::string& name, const std::string& layout, const kf_blob* blobs, size_t num_blobs,
                          kf_neighbour kind, uint64_t seed, bool ahead);

 private:
  struct Ahead {
    std::unique_ptr<Exchange> exchange;
    std::string layout;
    std::vector<uint64_t> sizes;
    bool ahead = false;
    std::mutex mutex;  // one caller at a time
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
