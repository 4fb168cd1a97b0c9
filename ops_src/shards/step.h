// One rank's contribution to a step of shards.
//
// 1. The step. Every member knows the partition: a pure function of the number of shards, the
// members, their weights, and the failures since. A member computes the gradients of its shards,
// one after the other, and brings each (Bring). Each is added to the sums that the member has, as
// far as siblings meet (tree.h). With its last shard begins the sum over all ranks. There a rank
// brings the few nodes that its shards make (collectives/planes.h), and all ranks get the root.
// Test: ShardsStep.HasTheBitsOfOnePlainSum
//
// 2. A failure. The reduction of a generation ends with the contributions of all its members or not
// at all, alike at all survivors, as every operation does (host/failure_rules.cc). A rank that
// fails after all that it brings is published has contributed. Otherwise all survivors go to the
// next generation, whose partition follows from the one before: the failed rank's shards are
// assigned to the others. A rank with new shards isn't ready for that generation: Bring returns
// "more", and the caller computes and brings them. The other ranks wait for it there. A second
// failure meanwhile is the same case again. Sums stay until the step is over, so nothing is
// computed twice except what was lost with its owner.
// Test: ShardsFailures.AStepIsWholeWhereverOneFails
// Test: ShardsFailures.AStepIsWholeWhereverTwoFail
//
// 3. No ranks wait in a circle. A rank waits only in the reduction of a generation to which it has
// brought all its shards. So a rank that waits owes nothing, and a rank that owes a shard doesn't
// wait.
// Test: ShardsFailures.AStepIsWholeWhereverOneFails
//
// 4. The groups of a step (dtypes, moving statistics) are reduced one after another, each from the
// generation in which the one before has ended. They needn't end in the same one: the root doesn't
// depend on which rank has brought what. No output counts before all groups have ended.
// Test: ShardsFailures.AStepIsWholeWhereverTwoFail
//
// 5. The bits of a root are a function of what the shards bring: one tree, each node rounded to the
// dtype that travels, left plus right, the first shard copied and never added to zeros, in one
// float environment.
// Test: ShardsTree.AnyAssignmentInAnyOrderHasTheBitsOfOnePlainSum
//
// 6. If gradients are watched (monitoring/gradient_norms.h), the squared norm of each shard's
// gradients goes through the tree as one more number. So all ranks have the same mean of them,
// under any partition.
// Test: ShardsStep.MeasuresTheGradientsOfItsShardsAndTheirMean
//
// 7. An update that can't be left out may run behind Bring: a framework's graph with a branch
// around it costs more than the update. Then the caller says first what that update writes to
// (UpdateFollows). If Bring returns "more" it copies that memory, and its outputs are zeros. The
// effects of the update are undone (UndoUpdate) before anything else is computed. The copy is right
// because Bring comes before the first write of the update, and undoing is right because it comes
// when the graph has ended. Until then no operation runs that other ranks would notice (Refuse),
// and no next step begins. If the caller can't undo the update, training is over. A step that is
// over at its first Bring costs none of this.
// Test: ShardsStep.RefusesWhatDoesNotBelongToIt
//
// 8. Moving statistics are tensors that computing a shard changes. Each shard begins with their
// values at the beginning of the step. Their root, the mean of their values after each shard, is
// their value when the step is over.
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

// What is equal at all members.
struct Plan {
  uint32_t shards = 1;
  double last = 1;                // what the last shard counts, if the others, which have more samples, count 1
  bool mean = true;               // the root is divided by what all shards count together
  std::vector<uint32_t> weights;  // by rank, of how much each is assigned; empty: all alike
  uint64_t seed = 0, step = 0;    // of the shards' random numbers
};

// What the random numbers of one draw are a function of, but for the element.
//
// The place says which layer draws: the how manieth draw it is since computing the shard began. A program draws in the
// same order wherever it runs, at a joiner as at a veteran and in either of MindSpore's modes, while a number that a
// layer gets when it is made depends on what else the process has made. A layer that is called twice draws twice.
struct Key {
  uint64_t seed, step;
  uint32_t shard, place;
};

// Memory that holds its contents for the whole step.
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

// Thread-safe; but a step is made by one caller, and a second one in the midst of it begins another step.
class Step {
 public:
  // The one of this process. It is never destroyed.
  static Step& Get();

  void Begin(std::shared_ptr<Communicator> communicator, const Plan& plan, const std::vector<Statistic>& statistics);

  // The shards that this rank has still to bring, as the partition is known here.
  Shards Missing() const;
  // What is brought next are this shard's gradients.
  void Take(uint32_t shard);
  // What is brought next counts for nothing: this rank has no shard (any more) and wants the root.
  void TakeNone();
  // What is brought next is only looked at: see Hashes.
  void TakeForHashes(uint32_t shard);

  // Behind what is taken runs an update, whatever Bring returns. `where`: what it writes to. Bring asks for that, on
  // its thread, if it is to be undone.
  void UpdateFollows(std::function<std::vector<Written>()> where);
  // Once that has run: if the step isn't over, what it has written is as it was before.
  void UndoUpdate();

  // Brings gradients. True: the step is over, and the root is in the outputs of `groups`. False: there is more in
  // Missing(). The groups are the same each time but for their memory. `loss` is the input of the one tensor in them
  // that is no gradient.
  bool Bring(const kf_group* groups, size_t num_groups, const void* loss = nullptr);
  // What the last Bring has returned, for a caller behind a graph that has run.
  bool Over() const;
  // The update is made. From Begin to here gradients aren't reduced in any other way, and nothing is while a shard is
  // computed: ranks compute different numbers of them. Refuse says so, for an operation of this name.
  void End() { inside_.store(Inside::kNothing, std::memory_order_relaxed); }
  void Refuse(const char* name, bool gradients) const;
  // The members of the next step that begins with `communicator`: without the ranks that are known to have failed in
  // its last one.
  Members MembersNow(const Communicator& communicator) const;
  // What this rank has computed since Begin, from Take to Bring: seconds, and shards.
  std::pair<double, uint32_t> Pace() const;
  // Of the next draw for the shard that is computed; none outside of a step. Refused in the update.
  std::optional<Key> NextKey();
  // Of the bits of each tensor that was brought after TakeForHashes.
  std::vector<uint64_t> Hashes() const;

 private:
  class Renewal;
  enum class Taken { kNothing, kShard, kNone, kForHashes };

  void Arm(Taken taken, uint32_t shard);
  void MoveTo(uint32_t generation);
  Shards MissingHere() const;
  void RestoreStatistics();
  std::vector<kf_group> WithOwn(const kf_group* groups, size_t num_groups);
  // What the shards count together.
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
  // All guarded by mutex_:
  std::shared_ptr<Communicator> communicator_;
  Plan plan_;
  Tree tree_{1};
  Partition partition_;
  uint32_t generation_ = 0;  // which `partition_` is for; of the step before, in which it ended
  std::vector<bool> brought_;
  Taken taken_ = Taken::kNothing;
  uint32_t shard_ = 0;
  uint32_t draws_ = 0;  // for what is taken
  bool begun_ = false;  // something has been brought
  bool over_ = true;
  size_t reduced_ = 0;  // groups whose root is there
  std::vector<PartialSums> sums_;
  std::vector<std::vector<char>> roots_;  // of groups that ended in an earlier Bring
  std::vector<uint64_t> hashes_;
  std::function<std::vector<Written>()> update_follows_;  // what it writes to; none: no update follows
  std::vector<Written> written_;                          // by one that is to be undone
  std::optional<std::vector<std::vector<char>>> kept_;    // of each, while the update is to be undone
  std::chrono::steady_clock::time_point taken_at_;
  double seconds_ = 0;     // from Take to Bring, of
  uint32_t computed_ = 0;  // so many shards

  bool watched_ = false;         // in this step, at all ranks
  double norm_ = 0, norms_ = 0;  // squared, of the shard that is brought; the mean over all
  const kf_tensor norm_tensor_{&norm_, &norms_, 1};
  double norms_cpu_s_ = 0;

  std::vector<Statistic> statistics_;
  std::vector<std::vector<char>> base_, root_;             // of each statistic
  std::vector<std::vector<kf_tensor>> statistic_tensors_;  // of each dtype
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_STEP_H_
