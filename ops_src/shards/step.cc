#include "shards/step.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/float_environment.h"
#include "base/hash.h"
#include "collectives/dtype.h"
#include "monitoring/gradient_norms.h"

namespace kungfu::shards {
namespace {

// Returns which tree nodes the members contribute, and how these nodes add up to the root.
Planes PlanesOf(const Tree& tree, const Partition& partition, const Members& members, uint32_t ranks, double divisor,
                uint64_t hash) {
  Planes planes;
  planes.of_rank.resize(ranks);
  planes.divisor = divisor;
  std::map<Node, int32_t> numbers;
  int32_t next = 0;
  for (const uint32_t rank : members) {
    for (const Node& node : tree.Cover(partition.Of(rank))) {
      numbers[node] = next++;
      planes.of_rank[rank]++;
    }
    planes.most = std::max(planes.most, planes.of_rank[rank]);
    for (const uint32_t shard : partition.Of(rank)) hash = Fnv1a(&shard, sizeof shard, hash);
    hash = Fnv1a(&rank, sizeof rank, hash);
  }
  planes.hash = hash;
  // Walks down from the root, and visits the left child before the right child. A node is added as
  // soon as both of its children are done.
  const auto add_up = [&](const auto& self, Node node) -> void {
    const auto found = numbers.find(node);
    if (found != numbers.end()) {
      planes.program.push_back(found->second);
      return;
    }
    const auto [left, right] = tree.Children(node);
    self(self, left);
    self(self, right);
    planes.program.push_back(Planes::kAdd);
  };
  add_up(add_up, tree.Root());
  return planes;
}

bool IsInPlace(const kf_group& group) {
  return std::any_of(group.tensors, group.tensors + group.num_tensors,
                     [](const kf_tensor& tensor) { return tensor.count > 0 && tensor.input == tensor.output; });
}

// Returns the squared norm of the gradients in these groups. If `outputs` is true, takes the
// gradients from the outputs, which are valid if the step has ended. Otherwise takes them from the
// inputs.
double SquaredNormOf(const kf_group* groups, size_t num_groups, const void* loss, bool outputs) {
  double sum = 0;
  for (size_t k = 0; k < num_groups; k++) {
    for (size_t i = 0; i < groups[k].num_tensors; i++) {
      const kf_tensor& tensor = groups[k].tensors[i];
      if (tensor.count == 0 || tensor.input == loss) continue;
      sum += monitoring::SquaredNorm(outputs ? tensor.output : tensor.input, tensor.count, groups[k].dtype);
    }
  }
  return sum;
}

uint64_t ElementsOf(const kf_group& group) {
  uint64_t elements = 0;
  for (size_t i = 0; i < group.num_tensors; i++) elements += group.tensors[i].count;
  return elements;
}

}  // namespace

// Builds the all-reduce of one group for any generation.
class Step::Renewal : public Communicator::Renewable {
 public:
  Renewal(Step& step, const kf_group& group, const PartialSums& sums, double divisor, uint64_t hash)
      : step_(step), group_(group), sums_(sums), divisor_(divisor), hash_(hash) {}

  const Operation* In(uint32_t generation) override {
    step_.MoveTo(generation);
    if (!step_.MissingHere().empty()) return nullptr;
    const Communicator& communicator = *step_.communicator_;
    planes_ = PlanesOf(step_.tree_, step_.partition_, communicator.MembersOf(generation), communicator.size(), divisor_,
                       hash_);
    for (const auto& [_, memory] : sums_.nodes()) planes_.own.push_back(memory);
    operation_ = {Kind::kAllReduce, group_.name, group_.tensors, group_.num_tensors, group_.dtype,
                  KF_SUM,           0,           group_.layout};
    operation_.planes = &planes_;
    return &operation_;
  }

 private:
  Step& step_;
  const kf_group& group_;
  const PartialSums& sums_;
  const double divisor_;
  const uint64_t hash_;
  Planes planes_;
  Operation operation_;
};

Step& Step::Get() {
  static Step* const step = new Step;
  return *step;
}

void Step::Begin(std::shared_ptr<Communicator> communicator, const Plan& plan,
                 const std::vector<Statistic>& statistics) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (plan.shards == 0 || plan.shards > kMaxShards) {
    throw Error(KF_INVALID, Text(plan.shards, " shards: a step has 1 to ", kMaxShards));
  }
  CheckUndone();
  if (communicator != communicator_) generation_ = 0;
  communicator_ = std::move(communicator);
  plan_ = plan;
  tree_ = Tree(plan.shards);
  const Members members = communicator_->MembersOf(generation_);
  std::vector<uint32_t> weights;
  for (const uint32_t rank : members) {
    if (rank < plan.weights.size()) weights.push_back(plan.weights[rank]);
  }
  if (weights.size() < members.size()) weights.clear();
  partition_ = Partition(plan.shards, members, weights);
  brought_.assign(plan.shards, false);
  taken_ = Taken::kNothing;
  begun_ = over_ = false;
  reduced_ = 0;
  roots_.clear();
  seconds_ = 0;
  computed_ = 0;
  watched_ = monitoring::GradientNorms::Get().Watching();
  norms_cpu_s_ = 0;

  statistics_ = statistics;
  base_.resize(statistics.size());
  root_.resize(statistics.size());
  for (size_t i = 0; i < statistics.size(); i++) {
    const size_t bytes = statistics[i].count * SizeOf(statistics[i].dtype);
    const auto* const data = static_cast<const char*>(statistics[i].data);
    base_[i].assign(data, data + bytes);
    root_[i].resize(bytes);
  }
}

Shards Step::Missing() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return MissingHere();
}

Shards Step::MissingHere() const {
  Shards missing;
  for (const uint32_t shard : partition_.Of(communicator_->rank())) {
    if (!brought_[shard]) missing.push_back(shard);
  }
  return missing;
}

void Step::Take(uint32_t shard) { Arm(Taken::kShard, shard); }
void Step::TakeNone() { Arm(Taken::kNone, 0); }
void Step::TakeForHashes(uint32_t shard) { Arm(Taken::kForHashes, shard); }

void Step::Arm(Taken taken, uint32_t shard) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (over_) throw Error(KF_INVALID, "no sharded step has begun");
  const Shards missing = MissingHere();
  if (taken == Taken::kShard && std::find(missing.begin(), missing.end(), shard) == missing.end()) {
    throw Error(KF_INVALID,
                Text("shard ", shard, " of ", plan_.shards, " isn't assigned to this rank, or was already added"));
  }
  taken_ = taken;
  shard_ = shard;
  taken_at_ = std::chrono::steady_clock::now();
  draws_ = 0;
  inside_.store(Inside::kShard, std::memory_order_relaxed);
  RestoreStatistics();
}

void Step::UpdateFollows(std::function<std::vector<Written>()> where) {
  std::lock_guard<std::mutex> guard(mutex_);
  CheckUndone();
  update_follows_ = std::move(where);
}

void Step::KeepWritten(const kf_group* groups, size_t num_groups) {
  if (!update_follows_) return;
  written_ = update_follows_();
  written_.erase(std::remove_if(written_.begin(), written_.end(), [](const Written& each) { return each.bytes == 0; }),
                 written_.end());
  kept_.emplace();
  for (const Written& each : written_) {
    const auto* const data = static_cast<const char*>(each.data);
    kept_->emplace_back(data, data + each.bytes);
  }
  for (size_t k = 0; k < num_groups; k++) {
    for (size_t i = 0; i < groups[k].num_tensors; i++) {
      const kf_tensor& tensor = groups[k].tensors[i];
      if (tensor.count > 0) std::memset(tensor.output, 0, tensor.count * SizeOf(groups[k].dtype));
    }
  }
  inside_.store(Inside::kUpdateForNothing, std::memory_order_relaxed);
}

void Step::UndoUpdate() {
  std::lock_guard<std::mutex> guard(mutex_);
  update_follows_ = nullptr;
  if (!kept_) return;
  for (size_t i = 0; i < kept_->size(); i++) std::memcpy(written_[i].data, (*kept_)[i].data(), (*kept_)[i].size());
  kept_.reset();
  inside_.store(Inside::kStep, std::memory_order_relaxed);
}

bool Step::Over() const {
  std::lock_guard<std::mutex> guard(mutex_);
  if (taken_ != Taken::kNothing)
    throw Error(KF_INVALID, "the gradients of a taken shard are missing; add them before the next step");
  return over_;
}

void Step::CheckUndone() const {
  if (kept_)
    throw Error(KF_INVALID, "an update that ran before its step had ended was not undone; resume from a checkpoint");
}

void Step::Refuse(const char* name, bool gradients) const {
  const Inside inside = inside_.load(std::memory_order_relaxed);
  if (inside == Inside::kNothing || (inside == Inside::kStep && !gradients)) return;
  throw Error(KF_INVALID,
              Text("\"", name,
                   "\" can't run in a sharded step, because the workers compute different "
                   "numbers of shards. ShardedStep reduces the gradients itself: pass forward_backward and "
                   "update without a KungFuGradReducer or KungFuAllReduce in them, and the optimizer itself"));
}

void Step::RestoreStatistics() {
  for (size_t i = 0; i < statistics_.size(); i++) std::memcpy(statistics_[i].data, base_[i].data(), base_[i].size());
}

std::optional<Key> Step::NextKey() {
  // Don't check `taken_` here. If the computation of a shard fails, `taken_` stays set.
  const Inside inside = inside_.load(std::memory_order_relaxed);
  if (inside == Inside::kNothing) return std::nullopt;
  if (inside != Inside::kShard) {
    throw Error(KF_INVALID,
                "ShardedStep's update draws random numbers (for example in a Dropout), which would differ "
                "between workers; move the random operation to forward_backward");
  }
  std::lock_guard<std::mutex> guard(mutex_);
  return Key{plan_.seed, plan_.step, shard_, draws_++};
}

std::pair<double, uint32_t> Step::Pace() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return {seconds_, computed_};
}

Members Step::MembersNow(const Communicator& communicator) const {
  std::lock_guard<std::mutex> guard(mutex_);
  return communicator.MembersOf(&communicator == communicator_.get() ? generation_ : 0);
}

std::vector<uint64_t> Step::Hashes() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return hashes_;
}

bool Step::Bring(const kf_group* groups, size_t num_groups, const void* loss) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto arrived = std::chrono::steady_clock::now();
  const Taken taken = std::exchange(taken_, Taken::kNothing);
  if (over_ || taken == Taken::kNothing) {
    throw Error(KF_INVALID,
                "gradients were summed over shards outside a ShardedStep, or a second time in one of its "
                "shards; use a separate ShardedStep for each sum");
  }
  inside_.store(Inside::kStep, std::memory_order_relaxed);
  const DefaultFloatEnvironment same_everywhere;
  if (taken == Taken::kForHashes) {
    ForHashes(groups, num_groups);
    RestoreStatistics();
    KeepWritten(groups, num_groups);
    return false;
  }
  const std::vector<kf_group> all = WithOwn(groups, num_groups);
  if (watched_ && taken == Taken::kShard) {
    const double began = monitoring::ThreadCpuSeconds();
    norm_ = SquaredNormOf(groups, num_groups, loss, /*outputs=*/false);
    norms_cpu_s_ += monitoring::ThreadCpuSeconds() - began;
  }
  if (!begun_) {
    begun_ = true;
    sums_.resize(all.size());
    for (size_t k = 0; k < all.size(); k++) sums_[k].Begin(all[k].dtype, ElementsOf(all[k]));
  }
  KUNGFU_CHECK(sums_.size() == all.size(), "this shard has ", all.size(), " groups, the previous one ", sums_.size());
  for (size_t k = reduced_; k < all.size() && taken == Taken::kShard; k++) {
    KUNGFU_CHECK(sums_[k].elements() == ElementsOf(all[k]), "shards have different numbers of elements");
    const bool is_norm = watched_ && k + 1 == all.size();
    const double share = shard_ + 1 == plan_.shards && !is_norm ? plan_.last : 1;
    // A failed attempt of an in-place operation overwrites the inputs that the next attempt needs.
    // So the inputs are copied.
    sums_[k].Add(tree_, shard_, all[k].tensors, all[k].num_tensors, share, /*borrow=*/!IsInPlace(all[k]));
  }
  if (taken == Taken::kShard) {
    brought_[shard_] = true;
    seconds_ += std::chrono::duration<double>(arrived - taken_at_).count();
    computed_++;
  }
  KUNGFU_FAULT_POINT("when a shard is added");
  over_ = MissingHere().empty() && Reduce(all, num_groups);
  if (!over_) {
    for (size_t k = reduced_; k < all.size(); k++) sums_[k].Keep(all[k].tensors, all[k].num_tensors);
    KeepRoots(all);
    KeepWritten(groups, num_groups);
    KUNGFU_FAULT_POINT("between two shards");
    return false;
  }
  update_follows_ = nullptr;
  GiveRoots(all);
  for (size_t i = 0; i < statistics_.size(); i++) std::memcpy(statistics_[i].data, root_[i].data(), root_[i].size());
  if (watched_) ReportNorms(groups, num_groups, loss);
  return true;
}

bool Step::Reduce(const std::vector<kf_group>& groups, size_t num_gradients) {
  for (; reduced_ < groups.size(); reduced_++) {
    const bool mean = plan_.mean || reduced_ >= num_gradients;
    const double total = watched_ && reduced_ + 1 == groups.size() ? plan_.shards : Total();
    Renewal renewal(*this, groups[reduced_], sums_[reduced_], mean ? total : 1,
                    Fnv1a(&plan_.last, sizeof plan_.last, Fnv1a(&mean, sizeof mean)));
    const auto ended = communicator_->RunRenewable(renewal, generation_);
    if (!ended) return false;
    MoveTo(*ended);
    KUNGFU_FAULT_POINT("between the sums of a step");
  }
  return true;
}

// Moves the step to a later generation. The partition of each generation follows from the previous
// partition and the rank that failed in between.
void Step::MoveTo(uint32_t generation) {
  for (; generation_ < generation; generation_++) {
    const Members before = communicator_->MembersOf(generation_), after = communicator_->MembersOf(generation_ + 1);
    const auto failed = std::find_if(before.begin(), before.end(), [&](uint32_t r) {
      return std::find(after.begin(), after.end(), r) == after.end();
    });
    KUNGFU_CHECK(failed != before.end(), "no rank has failed between generations ", generation_, " and ",
                 generation_ + 1);
    partition_.Lose(*failed);
  }
}

// Copies the roots of the groups that have ended, if a later group hasn't ended yet. The groups'
// memory is valid only during this launch.
void Step::KeepRoots(const std::vector<kf_group>& groups) {
  for (size_t k = roots_.size(); k < reduced_; k++) {
    std::vector<char>& root = roots_.emplace_back();
    for (size_t i = 0; i < groups[k].num_tensors; i++) {
      const auto* const from = static_cast<const char*>(groups[k].tensors[i].output);
      root.insert(root.end(), from, from + groups[k].tensors[i].count * SizeOf(groups[k].dtype));
    }
  }
}

void Step::GiveRoots(const std::vector<kf_group>& groups) const {
  for (size_t k = 0; k < roots_.size(); k++) {
    const char* from = roots_[k].data();
    for (size_t i = 0; i < groups[k].num_tensors; i++) {
      const size_t bytes = groups[k].tensors[i].count * SizeOf(groups[k].dtype);
      if (bytes > 0) std::memcpy(groups[k].tensors[i].output, from, bytes);
      from += bytes;
    }
  }
}

// Adds the step's own tensors to the groups. Statistics are added to the gradient group of the same
// dtype, which saves one reduction. If there is no such group, or if the gradients aren't divided,
// the statistics form a group after all gradients. The last group is the norm.
std::vector<kf_group> Step::WithOwn(const kf_group* groups, size_t num_groups) {
  std::vector<kf_group> all(groups, groups + num_groups);
  statistic_tensors_.assign(kNumDtypes, {});
  for (size_t i = 0; i < statistics_.size(); i++) {
    statistic_tensors_[statistics_[i].dtype].push_back({statistics_[i].data, root_[i].data(), statistics_[i].count});
  }
  for (int dtype = 0; dtype < kNumDtypes; dtype++) {
    std::vector<kf_tensor>& tensors = statistic_tensors_[dtype];
    if (tensors.empty()) continue;
    const auto gradients = std::find_if(all.begin(), all.begin() + num_groups,
                                        [&](const kf_group& group) { return group.dtype == dtype; });
    if (plan_.mean && gradients != all.begin() + num_groups) {
      tensors.insert(tensors.begin(), gradients->tensors, gradients->tensors + gradients->num_tensors);
      gradients->tensors = tensors.data();
      gradients->num_tensors = tensors.size();
      continue;
    }
    all.push_back({"kungfu/shards/statistics", tensors.data(), tensors.size(), static_cast<kf_dtype>(dtype), nullptr});
  }
  if (watched_) all.push_back({"kungfu/shards/norms", &norm_tensor_, 1, KF_FLOAT64, nullptr});
  return all;
}

void Step::ReportNorms(const kf_group* groups, size_t num_groups, const void* loss) const {
  const double began = monitoring::ThreadCpuSeconds();
  monitoring::Norms seen;
  seen.brought = norms_;
  seen.reduced = SquaredNormOf(groups, num_groups, loss, /*outputs=*/true);
  if (!plan_.mean) seen.reduced /= Total() * Total();
  for (size_t k = 0; k < num_groups; k++) seen.elements += ElementsOf(groups[k]);
  if (loss != nullptr) seen.elements--;
  seen.cpu_s = norms_cpu_s_ + monitoring::ThreadCpuSeconds() - began;
  monitoring::GradientNorms::Get().Add(seen);
}

void Step::ForHashes(const kf_group* groups, size_t num_groups) {
  hashes_.clear();
  for (size_t k = 0; k < num_groups; k++) {
    for (size_t i = 0; i < groups[k].num_tensors; i++) {
      const kf_tensor& tensor = groups[k].tensors[i];
      hashes_.push_back(Fnv1a(tensor.input, tensor.count * SizeOf(groups[k].dtype)));
    }
  }
}

}  // namespace kungfu::shards
