// One rank's part in a step that is a deal of shards.
//
// The step. Every member knows the deal: a pure function of the number of leaves, the members, their weights, and the
// deaths since. It computes the gradients of its leaves, one after the other, and brings each (Bring). That is added to
// the sums that it has, as far as siblings meet (tree.h). With its last leaf begins the sum over all ranks, in which a
// rank brings the few nodes that its leaves make (collectives/planes.h), and everybody gets the root.
//
// A death. The reduction of a generation ends with all its members' parts or not at all, at all survivors alike, as
// every operation does (host/failure_rules.cc): who dies when all he brings is out has part in it. Else all survivors
// go to the next generation, whose deal follows from that of the one before: the dead rank's leaves are the others'.
// Who has got some isn't ready for that generation: Bring answers "more", the caller computes them and brings them. The
// others wait for him there. A second death in the meantime is the same case again. What a rank has added up stays
// until the step is over, so nothing is computed twice but what died with its owner.
//
// Nobody waits in a circle: a rank waits only in the reduction of a generation to which it has brought all its leaves
// there, so who waits owes nothing; and who owes a leaf waits for nobody.
//
// The groups of a step (dtypes, moving statistics) are reduced one after another, each from the generation on in which
// the one before has ended. They needn't end in the same one: the root doesn't depend on who has brought what. No
// output counts before all have ended.
//
// The bits of a root are a function of what the leaves bring: one tree, each node rounded to the dtype that travels,
// left plus right, the first leaf copied and never added to zeros, in one float environment.
//
// Where gradients are watched (monitoring/gradient_norms.h), the squared norm of each leaf's goes through the tree as
// one number more, so that all ranks have the same mean of them, whoever computed which leaf.
//
// What runs behind Bring may be an update that can't be left out: a framework's graph with a branch around it costs
// more than the update. Then the caller says first what that update writes to (UpdateFollows). Where Bring answers
// "more" it takes a copy of that, and its outputs are zeros; what the update makes of them is undone (UndoUpdate)
// before anything else is computed. The copy is right because Bring is before the first write of the update, and the
// undoing because it comes when the graph has ended. Until then nothing runs that others would learn of (Refuse), and
// no next one begins: where the caller couldn't undo it, training is over. A step that is whole at its first Bring
// costs nothing of it.
//
// Moving statistics are tensors that computing a leaf changes. Each leaf begins with their values as the step began,
// and their root, the mean of their values after each leaf, is what they are when it is over.
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
#include "shards/deal.h"
#include "shards/partial_sums.h"
#include "shards/tree.h"

namespace kungfu::shards {

// What is equal at all members.
struct Plan {
  uint32_t leaves = 1;
  double last = 1;                // what the last leaf counts, where the others, which have more samples, count 1
  bool mean = true;               // the root is divided by what all leaves count together
  std::vector<uint32_t> weights;  // by rank, of how much each is dealt; empty: all alike
  uint64_t seed = 0, step = 0;    // of the leaves' random numbers
};

// What the random numbers of one draw are a function of, but for the element.
//
// The place says which layer draws: the how manieth draw it is since computing the leaf began. A program draws in the
// same order wherever it runs, at a joiner as at a veteran and in either of MindSpore's modes, while a number that a
// layer gets when it is made depends on what else the process has made. A layer that is called twice draws twice.
struct Key {
  uint64_t seed, step;
  uint32_t leaf, place;
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

  // The leaves that this rank has still to bring, as the deal is known here.
  Leaves Missing() const;
  // What is brought next are this leaf's gradients.
  void Take(uint32_t leaf);
  // What is brought next counts for nothing: this rank has no leaf (any more) and wants the root.
  void TakeNone();
  // What is brought next is only looked at: see Hashes.
  void TakeForHashes(uint32_t leaf);

  // Behind what is taken runs an update, whatever Bring returns. `where`: what it writes to. Bring asks for that, on
  // its thread, where it is to be undone.
  void UpdateFollows(std::function<std::vector<Written>()> where);
  // Once that has run: where the step isn't over, what it has written is as it was before.
  void UndoUpdate();

  // Brings gradients. True: the step is over, and the root is in the outputs of `groups`. False: there is more in
  // Missing(). The groups are the same each time but for their memory. `loss` is the input of the one tensor in them
  // that is no gradient.
  bool Bring(const kf_group* groups, size_t num_groups, const void* loss = nullptr);
  // What the last Bring has returned, for whom it can't tell: behind a graph that has run.
  bool Over() const;
  // The update is made. From Begin to here gradients aren't reduced in any other way, and nothing is while a shard is
  // computed: ranks compute different numbers of them. Refuse says so, for an operation of this name.
  void End() { inside_.store(Inside::kNothing, std::memory_order_relaxed); }
  void Refuse(const char* name, bool gradients) const;
  // To whom the next step is dealt that begins with `communicator`: without those who are known to have died in its
  // last one.
  Members MembersNow(const Communicator& communicator) const;
  // What this rank has computed since Begin, from Take to Bring: seconds, and leaves.
  std::pair<double, uint32_t> Pace() const;
  // Of the next draw for the leaf that is computed; none outside of a step. Refused in the update.
  std::optional<Key> NextKey();
  // Of the bits of each tensor that was brought after TakeForHashes.
  std::vector<uint64_t> Hashes() const;

 private:
  class Renewal;
  enum class Taken { kNothing, kLeaf, kNone, kForHashes };

  void Arm(Taken taken, uint32_t leaf);
  void MoveTo(uint32_t generation);
  Leaves MissingHere() const;
  void RestoreStatistics();
  std::vector<kf_group> WithOwn(const kf_group* groups, size_t num_groups);
  // What the leaves count together.
  double Total() const { return plan_.leaves - 1 + plan_.last; }
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
  Deal deal_;
  uint32_t generation_ = 0;  // which `deal_` is for; of the step before, in which it ended
  std::vector<bool> brought_;
  Taken taken_ = Taken::kNothing;
  uint32_t leaf_ = 0;
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
  uint32_t computed_ = 0;  // so many leaves

  bool watched_ = false;         // in this step, at all ranks
  double norm_ = 0, norms_ = 0;  // squared, of the leaf that is brought; the mean over all
  const kf_tensor norm_tensor_{&norm_, &norms_, 1};
  double norms_cpu_s_ = 0;

  std::vector<Statistic> statistics_;
  std::vector<std::vector<char>> base_, root_;             // of each statistic
  std::vector<std::vector<kf_tensor>> statistic_tensors_;  // of each dtype
};

}  // namespace kungfu::shards

#endif  // KUNGFU_SHARDS_STEP_H_
