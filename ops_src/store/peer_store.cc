#include "store/peer_store.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "base/interrupt.h"

namespace kungfu::store {

int64_t NeighbourChoice::Choose(uint32_t rank, uint32_t size, const std::function<bool(uint32_t)>& take) {
  if (size < 2) return -1;
  if (kind_ == KF_ROUND_ROBIN) {
    for (uint32_t tried = 0; tried + 1 < size; tried++) {
      const auto other = static_cast<uint32_t>((rank + 1 + turn_++ % (size - 1)) % size);
      if (take(other)) return other;
    }
    return -1;
  }
  std::vector<uint32_t> others(size - 1);
  std::iota(others.begin(), others.end(), 0u);
  for (uint32_t& other : others) other += other >= rank;
  // A rank that can't be taken is removed from the list, so that all other ranks stay equally
  // likely.
  while (!others.empty()) {
    const size_t drawn = std::uniform_int_distribution<size_t>(0, others.size() - 1)(random_);
    if (take(others[drawn])) return others[drawn];
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(drawn));
  }
  return -1;
}

Exchange::Exchange(std::string name, kf_neighbour kind, uint64_t seed) : name_(std::move(name)), choice_(kind, seed) {}

Exchange::~Exchange() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Exchange::AwaitIdle(std::unique_lock<std::mutex>& lock) {
  // If the model is on this host, the wait is short. Otherwise the wait for the network, or for the
  // loss of the other host, may take a while.
  while (!changed_.wait_for(lock, std::chrono::milliseconds(20), [this] { return !busy_; })) InterruptCheck::Run();
}

void Exchange::Begin(const Position& here, const Views& views, const std::string& layout,
                     const std::vector<uint64_t>& sizes) {
  std::unique_lock<std::mutex> lock(mutex_);
  AwaitIdle(lock);
  begun_in_ = here.cluster_version;
  source_ = {};
  layout_ = layout;
  buffer_.resize(sizes.size());
  for (size_t i = 0; i < sizes.size(); i++) buffer_[i].resize(sizes[i]);
  from_.clear();
  // Choose on this thread, because `views` may call Python. Only a request shows whether a rank on
  // another host has a model. So the list contains ranks on other hosts, up to the first rank that
  // is known to have a model. The fetching thread requests the model from the ranks in this order.
  // So the choice is the same as if all ranks were on this host.
  choice_.Choose(here.rank, here.size, [&](uint32_t other) {
    const auto view = views(other);
    if (view == nullptr) return false;
    from_.emplace_back(other, view);
    return view->IsHere();
  });
  if (from_.empty()) return;
  busy_ = true;
  if (!thread_.joinable()) thread_ = std::thread([this] { Serve(); });
  changed_.notify_all();
}

Source Exchange::Take(const Position& here, const Views& views, const std::string& layout, const kf_blob* blobs,
                      size_t num_blobs) {
  std::vector<uint64_t> sizes(num_blobs);
  for (size_t i = 0; i < num_blobs; i++) sizes[i] = blobs[i].nbytes;
  std::unique_lock<std::mutex> lock(mutex_);
  AwaitIdle(lock);
  const bool usable = begun_in_ == here.cluster_version && source_.version != 0 && layout_ == layout;
  if (!usable) {
    // No usable model has been fetched in this cluster version.
    lock.unlock();
    Begin(here, views, layout, sizes);
    lock.lock();
    AwaitIdle(lock);
  }
  begun_in_.reset();
  if (source_.version == 0) return {};
  for (size_t i = 0; i < num_blobs; i++) {
    KUNGFU_CHECK(buffer_[i].size() == blobs[i].nbytes, buffer_[i].size(), " and ", blobs[i].nbytes);
    std::copy(buffer_[i].begin(), buffer_[i].end(), static_cast<char*>(blobs[i].data));
  }
  return source_;
}

void Exchange::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return busy_ || stop_; });
    if (stop_) return;
    std::vector<kf_blob> blobs;
    for (auto& part : buffer_) blobs.push_back({part.data(), part.size()});
    const auto from = std::move(from_);
    from_.clear();
    const std::string layout = layout_;
    lock.unlock();
    Source source;
    size_t asked = 0;
    for (const auto& [rank, view] : from) {
      if (source.version != 0) break;
      asked++;
      try {
        const uint64_t version = view->Request(name_, layout, blobs.data(), blobs.size());
        if (version != 0) source = {rank, version};
      } catch (const Error&) {
        // The peer has a model with another layout, or saves without a pause. Treat it like a peer
        // without a model.
      }
    }
    lock.lock();
    choice_.PutBack(from.size() - asked);
    source_ = source;
    busy_ = false;
    changed_.notify_all();
  }
}

void PeerStore::SetHandlers(Announce announce, Find find) {
  std::lock_guard<std::mutex> guard(mutex_);
  announce_ = std::move(announce);
  find_ = std::move(find);
}

void PeerStore::Reset() {
  KeepOtherHosts(UINT64_MAX);  // this must come first, because it ends all waits for other hosts
  std::map<std::string, std::shared_ptr<Ahead>> aheads;
  std::lock_guard<std::mutex> guard(mutex_);
  aheads.swap(aheads_);
  views_.clear();
  own_.reset();
}

std::shared_ptr<ModelStore> PeerStore::OwnStore() {
  Announce announce;
  std::shared_ptr<ModelStore> own;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (own_ != nullptr) return own_;
    own = own_ = std::make_shared<ModelStore>();
    announce = announce_;
  }
  try {
    // Don't hold the lock, because `announce` calls Python, and Python's threads may wait for the
    // lock.
    if (announce) announce(own->fd());
  } catch (...) {
    std::lock_guard<std::mutex> guard(mutex_);
    own_.reset();
    throw;
  }
  return own;
}

void PeerStore::AddOtherHosts(uint64_t cluster_version, std::shared_ptr<OtherHosts> others) {
  std::lock_guard<std::mutex> guard(mutex_);
  other_hosts_[cluster_version] = std::move(others);
}

void PeerStore::KeepOtherHosts(uint64_t cluster_version) {
  std::map<uint64_t, std::shared_ptr<OtherHosts>> gone;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    gone.swap(other_hosts_);
    if (const auto kept = gone.find(cluster_version); kept != gone.end()) other_hosts_.insert(gone.extract(kept));
  }
  for (const auto& [version, others] : gone) others->Close();
}

std::shared_ptr<ModelView> PeerStore::ViewOf(uint64_t cluster_version, uint32_t rank, uint32_t own_rank) {
  if (rank == own_rank) {
    std::shared_ptr<ModelStore> own;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      own = own_;
    }
    if (own == nullptr) return nullptr;
    // The deleter keeps the store alive as long as the view exists.
    return std::shared_ptr<StoreView>(new StoreView(own->fd(), /*own=*/true), [own](StoreView* view) { delete view; });
  }
  Find find;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (views_of_ != cluster_version) {
      // In this cluster version, the ranks belong to other workers.
      views_.clear();
      views_of_ = cluster_version;
    }
    const auto others = other_hosts_.find(cluster_version);
    if (others != other_hosts_.end() && others->second->Have(rank)) return OtherHosts::ViewOf(others->second, rank);
    const auto found = views_.find(rank);
    if (found != views_.end()) return found->second;
    find = find_;
  }
  auto view = StoreView::Take(find ? find(rank) : -1);
  if (view == nullptr) return nullptr;
  std::lock_guard<std::mutex> guard(mutex_);
  if (views_of_ == cluster_version) views_.emplace(rank, view);
  return view;
}

uint64_t PeerStore::Save(const std::string& name, const std::string& layout, const kf_blob* blobs, size_t num_blobs) {
  process_.Refuse("save models");
  const uint64_t version = OwnStore()->Save(name, layout, blobs, num_blobs);
  std::shared_ptr<Ahead> next;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = aheads_.find(name);
    if (found != aheads_.end()) next = found->second;
  }
  if (next != nullptr) {
    std::lock_guard<std::mutex> guard(next->mutex);
    if (next->ahead) {
      const Position here = here_();
      next->exchange->Begin(here, Others(here, name), next->layout, next->sizes);
    }
  }
  return version;
}

// Returns null if the rank's process has ended, or if it has saved nothing yet.
std::shared_ptr<ModelView> PeerStore::LivingViewOf(uint32_t rank) {
  const Position here = here_();
  if (rank >= here.size) throw Error(KF_INVALID, Text("there is no rank ", rank, " in a cluster of ", here.size));
  auto view = ViewOf(here.cluster_version, rank, here.rank);
  return view != nullptr && view->OwnerLives() ? view : nullptr;
}

Description PeerStore::Describe(uint32_t rank, const std::string& name) {
  const auto view = LivingViewOf(rank);
  return view == nullptr ? Description{} : view->Describe(name);
}

uint64_t PeerStore::Request(uint32_t rank, const std::string& name, const std::string& layout, const kf_blob* blobs,
                            size_t num_blobs) {
  const auto view = LivingViewOf(rank);
  return view == nullptr ? 0 : view->Request(name, layout, blobs, num_blobs);
}

Exchange::Views PeerStore::Others(const Position& here, const std::string& name) {
  return [this, here, name](uint32_t rank) -> std::shared_ptr<ModelView> {
    auto view = ViewOf(here.cluster_version, rank, here.rank);
    if (view == nullptr || !view->OwnerLives()) return nullptr;
    return !view->IsHere() || view->Describe(name).version != 0 ? view : nullptr;
  };
}

Source PeerStore::RequestNeighbour(const std::string& name, const std::string& layout, const kf_blob* blobs,
                                   size_t num_blobs, kf_neighbour kind, uint64_t seed, bool ahead) {
  std::shared_ptr<Ahead> next;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    auto& known = aheads_[name];
    if (known == nullptr) {
      known = std::make_shared<Ahead>();
      known->exchange = std::make_unique<Exchange>(name, kind, seed);
    }
    next = known;
  }
  std::lock_guard<std::mutex> guard(next->mutex);
  next->layout = layout;
  next->sizes.resize(num_blobs);
  for (size_t i = 0; i < num_blobs; i++) next->sizes[i] = blobs[i].nbytes;
  next->ahead = ahead;
  const Position here = here_();
  return next->exchange->Take(here, Others(here, name), layout, blobs, num_blobs);
}

}  // namespace kungfu::store
