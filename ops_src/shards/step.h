// One rank's contribution to a sharded step.
//
// 1. The step. Every member computes the same partition, because the partition depends only on the
// number of shards, the members, their weights, and the later failures. A member computes the
// gradients of its shards one after another, and adds each shard with Bring. As soon as two
// siblings of the tree (tree.h) are present, Bring adds them up into one partial sum. The call for
// the member's last shard begins the sum over all ranks. Each rank contributes the few nodes that
// its shards add up to (collectives/planes.h), and all ranks get the root.
// Test: ShardsStep.HasTheBitsOfOnePlainSum
//
// 2. A failure. The reduction of a generation ends either with the contributions of all its members
// or not at all. The outcome is the same on all survivors, as with every operation
// (host/failure_rules.cc). A rank that fails after all its nodes are published has contributed. If
// the rank fails earlier, all survivors go to the next generation, in which the failed rank's
// shards are assigned to the other members. A rank that gets new shards isn't ready for that
// generation. Bring returns "more" on this rank, and the caller computes and adds the new shards.
// The other ranks wait for this rank in that generation. A second failure is handled in the same
// way. All ranks keep their partial sums until the step has ended, so only the failed rank's shards
// are computed again.
// Test: ShardsFailures.AStepIsWholeWhereverOneFails
// Test: ShardsFailures.AStepIsWholeWhereverTwoFail
//
// 3. No circular wait. A rank waits only in the reduction of a generation, and only after it has
// added all its shards of that generation. So a rank that still has shards to add doesn't wait.
// Test: ShardsFailures.AStepIsWholeWhereverOneFails
//
// 4. The groups of a step (gradients by dtype, moving statistics) are reduced one after another.
// Each group starts in the generation in which the previous group has ended. Groups may end in
// different generations, because the root doesn't depend on which rank added which shard. No output
// is valid before all groups have ended.
// Test: ShardsFailures.AStepIsWholeWhereverTwoFail
//
// 5. Equal gradients of the shards give bitwise equal roots. The tree is fixed. Each node is the
// left child plus the right child, rounded to the dtype in which the node is sent. The first shard
// is copied and never added to zeros. All additions use the same float environment.
// Test: ShardsTree.AnyAssignmentInAnyOrderHasTheBitsOfOnePlainSum
//
// 6. If gradients are watched (monitoring/gradient_norms.h), the squared norm of each shard's
// gradients is added up in the tree like one more gradient. So all ranks get the same mean of the
// norms, independently of the partition.
// Test: ShardsStep.MeasuresTheGradientsOfItsShardsAndTheirMean
//
// 7. An update may run after Bring even if the step hasn't ended, because in a framework's graph, a
// branch around the update costs more than the update itself. The caller must first declare this
// with UpdateFollows, and name the memory that the update writes to. Before Bring returns "more",
// it copies that memory and fills its outputs with zeros. UndoUpdate then restores the memory
// before anything else is computed. The copy is complete, because Bring runs before the update's
// first write. The restoration is complete, because UndoUpdate runs after the graph has ended. In
// between, Refuse prevents every operation that other ranks would notice, and the next step can't
// begin. If the caller can't undo the update, training can't continue. A step that ends in its
// first call of Bring has none of these costs.
// Test: ShardsStep.RefusesWhatDoesNotBelongToIt
//
// 8. Moving statistics are tensors that the computation of a shard changes. Each shard begins with
// the values that the statistics had at the beginning of the step. When the step has ended, each
// statistic has the value of its root: the mean of its values after each shard.
// Test: ShardsStep.HasTheBitsOfOnePlainSum
#ifndef KUNGFU_SHARDS_STEP_H_
#define KUNGFU_SHARDS_STEP_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/communicator.h"
#include "shards/partial_sums.h"
#include "shards/partition.h"
#include "shards/tree.h"

namespace kungfu::shards {

// The values of a step that are equal on all members.
struct Plan {
  uint32_t shards = 1;
  double last = 1;                // the weight of the last shard, which may have fewer samples; all other shards have
                                  // weight 1
  bool mean = true;               // whether the root is divided by the sum of the shards' weights
  std::vector<uint32_t> weights;  // the speed of each rank; if empty, all speeds are equal
  uint64_t seed = 0, step = 0;    // they determine the shards' random numbers
};

// The values that, together with an element's index, determine the random numbers of one draw.
//
// `place` is the number of draws since the computation of the shard began. A program makes its
// draws in the same order everywhere: on new and old workers, and in both of MindSpore's modes. A
// number assigned at a layer's creation would depend on the other layers that the process has
// created.
struct Key {
  uint64_t seed, step;
  uint32_t shard, place;
};

// A moving statistic. The memory must stay valid during the whole step.
struct Statistic {
  kf_dtype dtype;
  void* data;
  uint64_t count;
};

// Memory that an update writes to.
struct Written {
  void* data;
  size_t bytes;
};

// Thread-safe, but only one caller may run a step: calling Begin during a step begins another step.
class Step {
 public:
  // Returns the process's step, which is never destroyed.
  static Step& Get();

  void Begin(std::shared_ptr<Communicator> communicator, const Plan& plan, const std::vector<Statistic>& statistics);

  // Returns the shards that this rank must still add, according to its current partition.
  Shards Missing() const;
  // Makes the next call of Bring add this shard's gradients.
  void Take(uint32_t shard);
  // Makes the next call of Bring add nothing, for a rank that has no shards left.
  void TakeNone();
  // Makes the next call of Bring only compute hashes of the gradients. See Hashes.
  void TakeForHashes(uint32_t shard);

  // Declares that an update runs after the next call of Bring, even if the step hasn't ended.
  // `where` returns the memory that the update writes to. If the update must be undone, Bring calls
  // `where` on the caller's thread.
  void UpdateFollows(std::function<std::vector<Written>()> where);
  // Restores the memory that the update has written to, unless the step has ended. Call it after
  // the update.
  void UndoUpdate();

  // Adds gradients. Returns true if the step has ended. The outputs of `groups` then hold the
  // result. Returns false if Missing() returns more shards. The groups must be the same in each
  // call, except for their memory. `loss` is the `input` pointer of the loss tensor, which isn't a
  // gradient. `loss` may be null.
  bool Bring(const kf_group* groups, size_t num_groups, const void* loss = nullptr);
  // Returns the result of the last call of Bring, for callers that run after the graph.
  bool Over() const;
  // `End` ends the step. Call it after the update. Between Begin and End, gradients can't be
  // reduced in any other way. While a shard is computed, no operation can run, because ranks
  // compute different numbers of shards. Refuse throws if an operation called `name` can't run now.
  void End() { inside_.store(Inside::kNothing, std::memory_order_relaxed); }
  void Refuse(const char* name, bool gradients) const;
  // Returns the members of the next step that begins with `communicator`. Excludes ranks that
  // failed in the communicator's last step.
  Members MembersNow(const Communicator& communicator) const;
  // Returns the seconds that this rank has computed since Begin (the sum of the times from Take to
  // Bring), and the number of shards that it has computed.
  std::pair<double, uint32_t> Pace() const;
  // Returns the key of the current shard's next draw, or none outside a step. Throws during the
  // update.
  std::optional<Key> NextKey();
  // Returns a hash of the bits of each tensor that was passed to Bring after TakeForHashes.
  std::vector<uint64_t> Hashes() const;

 private:
  class Renewal;
  enum class Taken { kNothing, kShard, kNone, kForHashes };

  void Arm(Taken taken, uint32_t shard);
  void MoveTo(uint32_t generation);
  Shards MissingHere() const;
  void RestoreStatistics();
  std::vector<kf_group> WithOwn(const kf_group* groups, size_t num_groups);
  // Returns the sum of the shards' weights.
  double Total() const { return plan_.shards - 1 + plan_.last; }
  void ReportNorms(const kf_group* groups, size_t num_groups, const void* loss) const;
  void KeepRoots(const std::vector<kf_group>& groups);
  void KeepWritten(const kf_group* groups, size_t num_groups);
  void GiveRoots(const std::vector<kf_group>& groups) const;
  void ForHashes(const kf_group* groups, size_t num_groups);
  bool Reduce(const std::vector<kf_group>& groups, size_t num_gradients);

  void CheckUndone() const;

  enum class Inside { kNothing, kShard, kStep, kUpdateForNothing };
  std::atomic<Inside> inside_{Inside::kNothing};
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::shared_ptr<Communicator> communicator_;
  Plan plan_;
  Tree tree_{1};
  Partition partition_;
  uint32_t generation_ = 0;  // the generation of `partition_`; before Begin, the generation in which the last step
                             // ended
  std::vector<bool> brought_;
  Taken taken_ = Taken::kNothing;
  uint32_t shard_ = 0;
  uint32_t draws_ = 0;  // number of draws for the taken shard
  bool begun_ = false;  // whether Bring has been called in this step
  bool over_ = true;
  size_t reduced_ = 0;  // number of groups whose root is known
  std::vector<PartialSums> sums_;
  std::vector<std::vector<char>> roots_;  // roots of groups that ended in an earlier call of Bring
  std::vector<uint64_t> hashes_;
  // Returns the memory that the update writes to. If this function is empty, no update will follow.
  std::function<std::vector<Written>()> update_follows_;
  std::vector<Written> written_;                        // the memory written by an update that must be undone
  std::optional<std::vector<std::vector<char>>> kept_;  // old contents of `written_`, until the update is undone
  std::chrono::steady_clock::time_point taken_at_;
  double seconds_ = 0;     // sum of the times from Take to Bring
  uint32_t computed_ = 0;  // number of shards computed in this time

  bool watched_ = false;         // whether gradients are watched in this step, which is the same on all ranks
  double norm_ = 0, norms_ = 0;  // squared norm of this shard's gradients, and the mean over all shards
  const kf_tensor norm_tensor_{&norm_, &norms_, 1};
  double norms_cpu_s_ = 0;

  std::vector<Statistic> statistics_;
  std::vector<std::vector<char>> base_, root_;             // one for each statistic
  std::vector<std::vector<kf_tensor>> statistic_tensors_;  // one list for each dtype
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_STEP_H_
