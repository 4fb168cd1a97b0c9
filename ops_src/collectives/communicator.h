// The collectives over exactly one cluster version on one host.
#ifndef KUNGFU_COLLECTIVES_COMMUNICATOR_H_
#define KUNGFU_COLLECTIVES_COMMUNICATOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "collectives/channel_table.h"
#include "collectives/staging_choice.h"
#include "kungfu/c_api.h"
#include "runtime/error.h"
#include "transport/shm/segment.h"

namespace kungfu {

enum class Kind : uint8_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kBarrier };

// What a caller asks for; every rank has to bring an equal one under the same name.
struct Operation {
  Kind kind = Kind::kBarrier;
  const char* name = "";
  const kf_tensor* tensors = nullptr;
  size_t num_tensors = 0;
  kf_dtype dtype = KF_UINT8;
  kf_op op = KF_SUM;
  uint32_t root = 0;
  const char* layout = nullptr;
};

struct CommunicatorOptions {
  std::chrono::milliseconds collective_timeout{600000};
  std::chrono::milliseconds join_timeout{300000};
};

class Cursor;  // walks over the tensors of an operation

// Immutable membership: a change makes a new communicator, and this one then answers every call with StaleClusterError.
//
// Thread-safe. Operations under different names run side by side on their callers' threads and don't wait for each
// other; under one name they take turns. Nothing is reordered: the k-th operation under a name meets the k-th of the
// other ranks.
class Communicator {
 public:
  // A cluster of one, which needs no memory shared with anybody.
  explicit Communicator(uint64_t cluster_version = 0);
  // Rank `rank` of `segment`. Announces itself; Assemble() waits for the others. `address` names this rank in messages.
  Communicator(std::shared_ptr<shm::Segment> segment, uint32_t rank, const std::string& address, bool has_state,
               const CommunicatorOptions& options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Waits until every rank has announced itself.
  void Assemble();

  void Run(const Operation& operation);

  uint32_t rank() const { return rank_; }
  uint32_t size() const { return size_; }
  uint64_t cluster_version() const { return cluster_version_; }
  // Newest cluster version that the launcher has announced.
  uint64_t announced() const;
  // Lowest rank that carried the training state when it joined, `size` if none did.
  uint32_t StateRoot() const;

  // Ends the communicator: callers inside and later ones get `status` with `reason`. Idempotent; the first reason
  // stays.
  void Close(kf_status status, const std::string& reason);
  // Tells the others that this rank won't take part any more.
  void Leave();

 private:
  struct Flight;  // an operation under way

  void Validate(const Operation& operation) const;
  void RunAlone(const Operation& operation) const;
  void RunShared(const Operation& operation);
  void RunOnce(Flight& flight);
  void RunChunks(Flight& flight);
  void RunPipelined(Flight& flight);
  void RunSplit(Flight& flight);
  shm::Post& PreparePost(const Flight& flight);
  void AwaitRoom(Flight& flight, uint32_t lane, uint32_t base, uint32_t chunk);
  void StageChunk(Flight& flight, uint32_t lane, uint32_t base, uint32_t chunk, Cursor& input);
  void AwaitPosts(Flight& flight);
  [[noreturn]] void ReportMismatch(Flight& flight);

  uint32_t BindLane(const Flight& flight);
  void LeaveLane(const Flight& flight, bool failed);

  // Waits until `counter` of `peer` has reached `target`.
  void Await(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight);
  void AwaitSlowly(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight);
  // Throws if waiting for `peer` has become pointless.
  void LookAround(const shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight);
  void ThrowIfClosed() const;
  void ThrowIfLost(const Operation& operation) const;
  void Abort(const Error& error);
  std::string PeerName(uint32_t rank) const;

  const std::shared_ptr<shm::Segment> segment_;  // null in a cluster of one
  const uint32_t rank_;
  const uint32_t size_;
  const uint64_t cluster_version_;
  const CommunicatorOptions options_;
  const bool oversubscribed_;  // more ranks than cores
  const uint32_t ahead_;       // chunks staged beyond the one that is being read
  std::unique_ptr<ChannelTable> channels_;
  StagingChoice staging_choice_;

  std::atomic<bool> closed_{false};
  mutable std::mutex close_mutex_;
  kf_status close_status_ = KF_OK;  // guarded by close_mutex_
  std::string close_reason_;        // guarded by close_mutex_
};

const char* NameOf(Kind kind);

}  // namespace kungfu

#endif  // KUNGFU_COLLECTIVES_COMMUNICATOR_H_
