// A step of shards has the bits of one plain sum over its shards, whichever ranks compute them, in whatever order,
// and whichever rank dies meanwhile, wherever.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "base/fault_point.h"
#include "clusters.h"
#include "collectives/dtype.h"
#include "collectives/lone_communicator.h"
#include "collectives/reduce.h"
#include "killed_ranks.h"
#include "monitoring/gradient_norms.h"
#include "ranks.h"
#include "shards/partial_sums.h"
#include "shards/partition.h"
#include "shards/step.h"
#include "shards/tree.h"

namespace kungfu::shards {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<char>;
using testing::Everywhere;
using testing::Ranks;
using testing::Seed;

// ---- the reference, which shares nothing with the tree but the arithmetic of 16-bit floats

template <typename T, typename Function>
void ForEach(Bytes& to, const Bytes& other, const Function& function) {
  auto* const x = reinterpret_cast<T*>(to.data());
  const auto* const y = reinterpret_cast<const T*>(other.data());
  for (size_t i = 0; i < to.size() / sizeof(T); i++) x[i] = function(x[i], y[i]);
}

Bytes Plus(kf_dtype dtype, Bytes left, const Bytes& right) {
  if (dtype == KF_FLOAT32) {
    ForEach<float>(left, right, [](float x, float y) { return x + y; });
  } else if (dtype == KF_FLOAT64) {
    ForEach<double>(left, right, [](double x, double y) { return x + y; });
  } else {
    const void* const sides[] = {left.data(), right.data()};
    ReductionFor(dtype, KF_SUM)(left.data(), sides, 2, left.size() / SizeOf(dtype));
  }
  return left;
}

Bytes Times(kf_dtype dtype, Bytes value, double share) {
  if (dtype == KF_FLOAT32) {
    ForEach<float>(value, value, [&](float x, float) { return x * float(share); });
  } else if (dtype == KF_FLOAT64) {
    ForEach<double>(value, value, [&](double x, double) { return x * share; });
  } else {
    const void* const source = value.data();
    BlendFor(dtype)(value.data(), &source, &share, 1, value.size() / SizeOf(dtype));
  }
  return value;
}

Bytes Over(kf_dtype dtype, Bytes value, double divisor) {
  if (dtype == KF_FLOAT32) {
    ForEach<float>(value, value, [&](float x, float) { return x / float(divisor); });
  } else if (dtype == KF_FLOAT64) {
    ForEach<double>(value, value, [&](double x, double) { return x / divisor; });
  } else {
    DivisionFor(dtype)(value.data(), value.data(), divisor, value.size() / SizeOf(dtype));
  }
  return value;
}

// The left side has as many shards as there are in the largest full tree that isn't all of it.
Bytes PlainSum(kf_dtype dtype, const std::vector<Bytes>& shards, size_t begin, size_t count) {
  if (count == 1) return shards[begin];
  size_t left = 1;
  while (left * 2 < count) left *= 2;
  return Plus(dtype, PlainSum(dtype, shards, begin, left), PlainSum(dtype, shards, begin + left, count - left));
}

// Of values of many magnitudes, some of them denormal: in another order their sum has other bits.
Bytes Draw(kf_dtype dtype, size_t count, std::mt19937& random) {
  Bytes bytes(count * SizeOf(dtype));
  for (size_t i = 0; i < count; i++) {
    const uint32_t drawn = random();
    const double magnitude = std::ldexp(1 + (drawn >> 8) * 0x1p-24, int(drawn % 12) - 6);
    const double value = (drawn & 16) != 0 ? -magnitude : magnitude;
    const bool denormal = i % 7 == 3;
    char* const at = bytes.data() + i * SizeOf(dtype);
    if (dtype == KF_FLOAT32) {
      const float x = float(denormal ? value * 0x1p-140 : value);
      std::memcpy(at, &x, sizeof x);
    } else if (dtype == KF_FLOAT64) {
      const double x = denormal ? value * 0x1p-1060 : value;
      std::memcpy(at, &x, sizeof x);
    } else {  // sign, a middling exponent, mantissa
      const uint32_t mantissa_bits = dtype == KF_FLOAT16 ? 10 : 7, bias = dtype == KF_FLOAT16 ? 15 : 127;
      const uint32_t exponent = denormal ? 0 : bias - 4 + drawn % 8;
      const auto x =
          uint16_t((drawn >> 31) << 15 | exponent << mantissa_bits | ((drawn >> 8) & ((1u << mantissa_bits) - 1)));
      std::memcpy(at, &x, sizeof x);
    }
  }
  return bytes;
}

// ---- the tree and the partition

constexpr kf_dtype kFloats[] = {KF_FLOAT32, KF_FLOAT64, KF_FLOAT16, KF_BFLOAT16};

Bytes SumOf(const Tree& tree, kf_dtype dtype, Node node, const std::map<Node, Bytes>& there) {
  const auto found = there.find(node);
  if (found != there.end()) return found->second;
  const auto [left, right] = tree.Children(node);
  return Plus(dtype, SumOf(tree, dtype, left, there), SumOf(tree, dtype, right, there));
}

// Deals the shards at random, adds them up in a random order, and puts together what the ranks have.
void ExpectPlainSum(uint32_t shards, kf_dtype dtype, std::mt19937& random) {
  const size_t count = 1 + random() % 12;
  const Tree tree(shards);
  std::vector<Bytes> values;
  for (uint32_t shard = 0; shard < shards; shard++) values.push_back(Draw(dtype, count, random));
  const double last = random() % 2 == 0 ? 1 : 0.375;
  std::vector<Bytes> counting = values;
  if (last != 1) counting.back() = Times(dtype, counting.back(), last);

  const uint32_t ranks = 1 + random() % 6;
  std::vector<PartialSums> sums(ranks);
  std::vector<Shards> assigned(ranks);
  for (PartialSums& each : sums) each.Begin(dtype, count);
  std::vector<uint32_t> order(shards);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const uint32_t shard : order) {
    const uint32_t rank = random() % ranks;
    assigned[rank].push_back(shard);
    Bytes memory = values[shard];
    const size_t first = count / 3 * SizeOf(dtype);
    const kf_tensor tensors[] = {{memory.data(), nullptr, count / 3},
                                 {nullptr, nullptr, 0},
                                 {memory.data() + first, nullptr, count - count / 3}};
    const bool borrow = random() % 2 == 0;
    sums[rank].Add(tree, shard, tensors, 3, shard + 1 == shards ? last : 1, borrow);
    if (borrow) sums[rank].Keep(tensors, 3);
    std::fill(memory.begin(), memory.end(), char(-1));
  }
  std::map<Node, Bytes> there;
  for (uint32_t rank = 0; rank < ranks; rank++) {
    std::sort(assigned[rank].begin(), assigned[rank].end());
    std::set<Node> nodes;
    for (const auto& [node, memory] : sums[rank].nodes()) {
      nodes.insert(node);
      there[node] = Bytes(memory, memory + count * SizeOf(dtype));
    }
    ASSERT_EQ(nodes, tree.Cover(assigned[rank])) << shards << " leaves";
  }
  ASSERT_EQ(SumOf(tree, dtype, tree.Root(), there), PlainSum(dtype, counting, 0, shards))
      << shards << " leaves of " << NameOf(dtype) << " over " << ranks << " ranks";
}

TEST(ShardsTree, AnyAssignmentInAnyOrderHasTheBitsOfOnePlainSum) {
  std::mt19937 random(Seed());
  for (uint32_t shards = 1; shards <= 70; shards++) {
    for (const kf_dtype dtype : kFloats) {
      for (int i = 0; i < 3; i++) ASSERT_NO_FATAL_FAILURE(ExpectPlainSum(shards, dtype, random));
    }
  }
  for (const uint32_t shards : {100u, 127u, 128u, 129u, 1000u, kMaxShards - 1, kMaxShards}) {
    for (const kf_dtype dtype : kFloats) ASSERT_NO_FATAL_FAILURE(ExpectPlainSum(shards, dtype, random));
  }
}

TEST(ShardsTree, ShardIsBroughtOnce) {
  const float x = 1;
  const kf_tensor tensor{&x, nullptr, 1};
  PartialSums sums;
  sums.Begin(KF_FLOAT32, 1);
  sums.Add(Tree(4), 2, &tensor, 1, 1, /*borrow=*/false);
  EXPECT_THROW(sums.Add(Tree(4), 2, &tensor, 1, 1, /*borrow=*/false), Error);
}

void ExpectEachOnce(const Partition& partition, uint32_t shards, const Members& members, bool contiguous) {
  std::vector<int> times(shards, 0);
  for (const uint32_t rank : members) {
    const Shards& mine = partition.Of(rank);
    ASSERT_TRUE(std::is_sorted(mine.begin(), mine.end()));
    for (const uint32_t shard : mine) {
      ASSERT_LT(shard, shards);
      times[shard]++;
    }
    if (contiguous && !mine.empty()) {
      ASSERT_EQ(mine.back() - mine.front() + 1, mine.size());
    }
    if (shards >= members.size()) {
      ASSERT_FALSE(mine.empty()) << "rank " << rank << " of " << members.size();
    }
  }
  ASSERT_EQ(times, std::vector<int>(shards, 1)) << shards << " leaves, " << members.size() << " members";
}

TEST(ShardsPartition, EachShardHasOneMemberAndEachMemberAShardIfEnough) {
  std::mt19937 random(Seed());
  for (uint32_t shards = 1; shards <= 70; shards++) {
    for (uint32_t size = 1; size <= 9; size++) {
      Members members;
      std::vector<uint32_t> weights;
      for (uint32_t i = 0; i < size; i++) {
        members.push_back(3 * i + 1);
        weights.push_back(1 + (random() % 2 == 0 ? random() % 4 : random() % 1000));
      }
      if (random() % 2 == 0) weights.clear();
      Partition partition(shards, members, weights);
      ASSERT_NO_FATAL_FAILURE(ExpectEachOnce(partition, shards, members, /*contiguous=*/true));
      EXPECT_TRUE(partition.Of(0).empty()) << "no member";
      while (members.size() > 1) {
        const size_t failed = random() % members.size();
        const Partition before = partition;
        partition.Lose(members[failed]);
        EXPECT_TRUE(partition.Of(members[failed]).empty());
        const size_t lost = before.Of(members[failed]).size();
        members.erase(members.begin() + long(failed));
        std::vector<int> times(shards, 0);
        for (const uint32_t rank : members) {
          const Shards &had = before.Of(rank), &has = partition.Of(rank);
          ASSERT_TRUE(std::includes(has.begin(), has.end(), had.begin(), had.end())) << "what it had it keeps";
          ASSERT_LE(has.size() - had.size(), (lost + members.size() - 1) / members.size()) << "evenly";
          for (const uint32_t shard : has) times[shard]++;
        }
        ASSERT_EQ(times, std::vector<int>(shards, 1));
      }
      for (const uint32_t rank : {1u, 4u, 7u}) {
        ASSERT_EQ(Partition(shards, {1, 4, 7}, {}).Of(rank), Partition(shards, {1, 4, 7}, {2, 2, 2}).Of(rank))
            << "a proportion";
      }
    }
  }
}

// When all would be done that have more than the one that each rank has.
double End(const Partition& partition, const Members& members, const std::vector<uint32_t>& speeds) {
  double end = 0;
  for (size_t i = 0; i < members.size(); i++) {
    const size_t count = partition.Of(members[i]).size();
    if (count > 1) end = std::max(end, double(count) / speeds[i]);
  }
  return end;
}

TEST(ShardsPartition, TheSlowestIsDoneAsEarlyAsItCanBe) {
  std::mt19937 random(Seed());
  for (uint32_t shards = 1; shards <= 70; shards++) {
    const uint32_t size = 1 + random() % 9;
    Members members(size);
    std::iota(members.begin(), members.end(), 0);
    std::vector<uint32_t> speeds;
    for (uint32_t i = 0; i < size; i++) speeds.push_back(1 + random() % 8);
    double best = shards <= size ? 0 : INFINITY;
    for (const uint32_t speed : speeds) {
      for (uint32_t k = 1; k <= shards; k++) {
        uint64_t done = 0;  // by k / speed
        for (const uint32_t other : speeds) done += std::max(1u, k * other / speed);
        if (done >= shards) best = std::min(best, double(k) / speed);
      }
    }
    EXPECT_LE(End(Partition(shards, members, speeds), members, speeds), best)
        << shards << " leaves, " << size << " members";
  }
  EXPECT_THROW(Partition(4, {0, 1}, {0, 1}), Error);
  EXPECT_THROW(Partition(4, {0, 1}, {1}), Error);
}

// ---- steps

struct Tensors {
  kf_dtype dtype;
  size_t count;
};

struct Case {
  uint32_t size;
  std::vector<Tensors> groups;
  std::vector<Tensors> statistics;
  uint32_t cores;
  bool watched;  // the gradients' norms
  Plan plan;

  std::string Name() const {
    std::string name =
        Text(size, " ranks on ", cores, " cores, ", plan.shards, " leaves, the last of ", plan.last,
             plan.mean ? ", mean" : ", sum", plan.weights.empty() ? "" : ", weights", watched ? ", watched" : "");
    for (const Tensors& group : groups) name += Text(", ", group.count, " ", NameOf(group.dtype));
    return name + Text(", ", statistics.size(), " statistics");
  }
};

constexpr int kSteps = 3;

// What all ranks compute, and what has to come out. The next step's statistics begin with what the one before has made.
struct Training {
  struct OfStep {
    std::vector<std::vector<Bytes>> gradients;    // by group and shard
    std::vector<Bytes> roots;                     // by group
    std::vector<Bytes> before, after;             // by statistic
    std::vector<std::vector<Bytes>> after_shard;  // by statistic and shard
    double norms;                                 // squared, the mean over the shards
  };

  explicit Training(const Case& its, unsigned seed) : is(its) {
    std::mt19937 random(seed);
    std::vector<Bytes> statistics;
    for (const Tensors& each : is.statistics) statistics.push_back(Draw(each.dtype, each.count, random));
    for (OfStep& step : steps) {
      for (const Tensors& group : is.groups) {
        step.gradients.push_back(DrawShards(group, random));
        step.roots.push_back(Root(group.dtype, step.gradients.back(), is.plan.mean));
      }
      step.norms = MeanNorm(step);
      step.before = statistics;
      for (const Tensors& each : is.statistics) {
        step.after_shard.push_back(DrawShards(each, random));
        step.after.push_back(Root(each.dtype, step.after_shard.back(), /*mean=*/true));
      }
      statistics = step.after;
    }
  }

  std::vector<Bytes> DrawShards(const Tensors& tensors, std::mt19937& random) const {
    std::vector<Bytes> shards;
    for (uint32_t shard = 0; shard < is.plan.shards; shard++) {
      shards.push_back(Draw(tensors.dtype, tensors.count, random));
    }
    return shards;
  }
  // Of tensors as Trainer::Bring has them: a third of a group each, and the rest.
  double MeanNorm(const OfStep& step) const {
    std::vector<Bytes> norms;
    for (uint32_t shard = 0; shard < is.plan.shards; shard++) {
      double norm = 0;
      for (size_t k = 0; k < is.groups.size(); k++) {
        const auto [dtype, count] = is.groups[k];
        const size_t first = count / 3;
        const char* const at = step.gradients[k][shard].data();
        if (first > 0) norm += monitoring::SquaredNorm(at, first, dtype);
        if (count > first) norm += monitoring::SquaredNorm(at + first * SizeOf(dtype), count - first, dtype);
      }
      const auto* const bytes = reinterpret_cast<const char*>(&norm);
      norms.emplace_back(bytes, bytes + sizeof norm);
    }
    double mean;
    std::memcpy(&mean, Over(KF_FLOAT64, PlainSum(KF_FLOAT64, norms, 0, norms.size()), is.plan.shards).data(),
                sizeof mean);
    return mean;
  }
  Bytes Root(kf_dtype dtype, std::vector<Bytes> shards, bool mean) const {
    if (is.plan.last != 1) shards.back() = Times(dtype, shards.back(), is.plan.last);
    const Bytes sum = PlainSum(dtype, shards, 0, shards.size());
    return mean ? Over(dtype, sum, is.plan.shards - 1 + is.plan.last) : sum;
  }

  const Case is;
  OfStep steps[kSteps];
};

void Require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

// One rank in a training.
class Trainer {
 public:
  Trainer(const Training& training, Communicator& communicator)
      : training_(training), communicator_(&communicator, [](Communicator*) {}) {
    statistics_ = training.steps[0].before;
    members_ = communicator.MembersOf(0);
    for (size_t i = 0; i < statistics_.size(); i++) {
      const Tensors& each = training.is.statistics[i];
      held_.push_back({each.dtype, statistics_[i].data(), each.count});
    }
  }
  virtual ~Trainer() = default;

  // Throws where anything isn't as it has to be.
  Members Train(int number) {
    const Training::OfStep& expected = training_.steps[number];
    Plan plan = training_.is.plan;
    plan.step = uint64_t(number);
    step_.Begin(communicator_, plan, held_);
    const Shards first = step_.Missing();
    Require(first == Partition(plan.shards, members_, WeightsOf(members_)).Of(communicator_->rank()),
            "the deal isn't that of who was left after the step before");
    for (bool over = false; !over;) {
      const Shards missing = step_.Missing();
      const uint32_t shard = missing.empty() ? 0 : missing[(communicator_->rank() + uint32_t(number)) % missing.size()];
      const bool inherited = !missing.empty() && !std::binary_search(first.begin(), first.end(), shard);
      if (missing.empty()) {
        step_.TakeNone();
      } else {
        step_.Take(shard);
        const auto key = step_.NextKey();
        Require(key && key->shard == shard && key->step == plan.step && key->place == 0, "the key is another leaf's");
      }
      Computing(inherited);
      for (size_t i = 0; i < statistics_.size(); i++) {
        Require(statistics_[i] == expected.before[i],
                Text("statistic ", i, " doesn't begin leaf ", shard, " as it began the step"));
        const Bytes& value = expected.after_shard[i][missing.empty() ? (shard + 1) % training_.is.plan.shards : shard];
        std::copy(value.begin(), value.end(), statistics_[i].begin());
      }
      // At every other shard and rank, an update that can't be left out.
      const bool follows = (shard + communicator_->rank()) % 2 == 0;
      const Bytes before = trained_;
      if (follows) {
        step_.UpdateFollows([this] { return std::vector<Written>{{trained_.data(), trained_.size()}, {nullptr, 0}}; });
      }
      over = Bring(expected, shard, follows);
      if (follows || over) std::fill(trained_.begin(), trained_.end(), char(number + 100));
      step_.UndoUpdate();
      Require(over || trained_ == before, "an update that doesn't count isn't undone");
      Require(!over || trained_ == Bytes(trained_.size(), char(number + 100)), "an update that counts is undone");
      Require(over || !step_.Missing().empty(), Text("step ", number, " isn't over, and nothing is missing"));
    }
    step_.End();
    for (size_t i = 0; i < statistics_.size(); i++) {
      Require(statistics_[i] == expected.after[i], Text("statistic ", i, " of step ", number, " has other bits"));
    }
    members_ = step_.MembersNow(*communicator_);
    return members_;
  }

 protected:
  virtual void Computing(bool /*inherited*/) {}

 private:
  std::vector<uint32_t> WeightsOf(const Members& members) const {
    std::vector<uint32_t> weights;
    for (const uint32_t r : members) {
      if (!training_.is.plan.weights.empty()) weights.push_back(training_.is.plan.weights[r]);
    }
    return weights;
  }

  // In memory that is another one each time, and has other contents afterwards.
  bool Bring(const Training::OfStep& expected, uint32_t shard, bool update_follows) {
    std::vector<Bytes> in, out;
    std::vector<std::vector<kf_tensor>> tensors;
    std::vector<kf_group> groups;
    for (size_t k = 0; k < expected.gradients.size(); k++) {
      const kf_dtype dtype = training_.is.groups[k].dtype;
      const size_t count = training_.is.groups[k].count, first = count / 3, unit = SizeOf(dtype);
      Bytes& x = in.emplace_back(expected.gradients[k][shard]);
      Bytes& y = out.emplace_back(x.size(), char(-1));
      tensors.push_back({{x.data(), y.data(), first},
                         {nullptr, nullptr, 0},
                         {x.data() + first * unit, y.data() + first * unit, count - first}});
      groups.push_back({"kungfu/shards", tensors.back().data(), 3, dtype, nullptr});  // all of one name, as the kernel
    }
    bool over = false;
#if defined(__SSE__)
    // What a framework's thread may have been set to: denormals are zeros, at every other rank.
    const unsigned before = _mm_getcsr();
    if (communicator_->rank() % 2 == 1) _mm_setcsr(before | 0x8040);
#endif
    over = step_.Bring(groups.data(), groups.size());
#if defined(__SSE__)
    _mm_setcsr(before);
#endif
    for (size_t k = 0; over && k < out.size(); k++) {
      Require(out[k] == expected.roots[k], Text("group ", k, " has other bits"));
    }
    for (const Bytes& each : out) {
      Require(over || !update_follows || each == Bytes(each.size(), 0), "an update that is undone is given no zeros");
    }
    for (Bytes& each : in) std::fill(each.begin(), each.end(), char(-1));
    return over;
  }

  const Training& training_;
  const std::shared_ptr<Communicator> communicator_;
  Step step_;
  Members members_;
  std::vector<Bytes> statistics_;
  std::vector<Statistic> held_;
  Bytes trained_ = Bytes(17, char(99));
};

// Sizes for each way of the exchange: in the mailboxes, at once, and chunk by chunk (pipelined between two ranks, split
// among more); with one dtype or two, and with moving statistics.
const std::vector<std::pair<std::vector<Tensors>, std::vector<Tensors>>>& Shapes() {
  static const std::vector<std::pair<std::vector<Tensors>, std::vector<Tensors>>> shapes = {
      {{{KF_FLOAT32, 2}}, {}},
      {{{KF_FLOAT32, 3001}}, {{KF_FLOAT32, 5}, {KF_FLOAT64, 3}, {KF_FLOAT32, 700}}},
      {{{KF_FLOAT32, 70001}}, {}},
      {{{KF_FLOAT16, 90001}, {KF_FLOAT32, 2}, {KF_FLOAT64, 501}}, {{KF_FLOAT32, 1}}},
      {{{KF_BFLOAT16, 1}, {KF_FLOAT32, 200001}}, {{KF_FLOAT32, 40}}},
      {{{KF_FLOAT64, 0}, {KF_FLOAT32, 40}}, {}},
  };
  return shapes;
}

Case DrawCase(uint32_t size, size_t shape, std::mt19937& random) {
  Case drawn{size, Shapes()[shape].first, Shapes()[shape].second, random() % 2 == 0 ? 2u : 8u, random() % 2 == 0, {}};
  drawn.plan.shards = random() % 6 == 0 ? 1 + random() % size : size + random() % (3 * size + 1);
  drawn.plan.last = random() % 2 == 0 ? 1 : 0.375;
  drawn.plan.mean = random() % 3 != 0;
  drawn.plan.seed = random();
  if (random() % 3 == 0) {
    for (uint32_t r = 0; r < size; r++) drawn.plan.weights.push_back(1 + random() % 4);
  }
  return drawn;
}

// Where ranks are threads they share what is seen.
struct Watched {
  explicit Watched(bool watched) { monitoring::GradientNorms::Get().Watch(watched ? "gradients" : ""); }
  ~Watched() { monitoring::GradientNorms::Get().Watch(""); }
};

// Where so many ranks are: on two or three hosts.
std::vector<uint32_t> SomeHosts(uint32_t size, std::mt19937& random) {
  const uint32_t hosts = std::min<uint32_t>(size, 2 + random() % 2);
  std::vector<uint32_t> host_of_rank;
  for (uint32_t r = 0; r < size; r++) host_of_rank.push_back(r < hosts ? r : random() % hosts);
  std::shuffle(host_of_rank.begin(), host_of_rank.end(), random);
  return host_of_rank;
}

TEST(ShardsStep, HasTheBitsOfOnePlainSum) {
  std::mt19937 random(Seed());
  for (uint32_t size = 1; size <= 5; size++) {
    for (size_t shape = 0; shape < Shapes().size(); shape++) {
      const unsigned seed = random();
      const Case drawn = DrawCase(size, shape, random);
      SCOPED_TRACE(drawn.Name());
      const Training training(drawn, seed);
      const Watched watched(drawn.watched);
      Members everyone(size);
      std::iota(everyone.begin(), everyone.end(), 0);
      const auto train = [&](uint32_t, Communicator& communicator) {
        Trainer trainer(training, communicator);
        for (int number = 0; number < kSteps; number++) {
          ASSERT_EQ(trainer.Train(number), everyone);
        }
      };
      Ranks ranks(size, {60s, 60s}, drawn.cores);
      ASSERT_NO_THROW(ranks.Run(train));
      if (size > 1) {
        testing::Clusters cluster(SomeHosts(size, random));
        ASSERT_NO_THROW(cluster.Run(train));
        continue;
      }
      LoneCommunicator lone;
      ASSERT_NO_THROW(train(0, lone));
    }
  }
}

TEST(ShardsStep, FailsEverywhereIfTheRanksAssignDifferently) {
  std::vector<Plan> others(5);
  for (Plan& plan : others) plan.shards = 6;
  const Plan plan = others[0];
  others[0].shards = 7;
  others[1].last = 0.5;
  others[2].mean = false;
  others[3].weights = {1, 4, 1};
  others[4].shards = 2;
  for (size_t i = 0; i < others.size(); i++) {
    Ranks ranks(3);
    const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
      Step step;
      step.Begin({&communicator, [](Communicator*) {}}, rank == 2 ? others[i] : plan, {});
      float x = 1, y = 0;
      const kf_tensor tensor{&x, &y, 1};
      const kf_group group{"kungfu/shards", &tensor, 1, KF_FLOAT32, nullptr};
      for (bool over = false; !over;) {
        const Shards missing = step.Missing();
        missing.empty() ? step.TakeNone() : step.Take(missing[0]);
        over = step.Bring(&group, 1);
      }
    });
    for (const auto& error : errors) EXPECT_EQ(testing::ErrorOf(error).status(), KF_MISMATCH) << "plan " << i;
  }
}

TEST(ShardsStep, RefusesWhatDoesNotBelongToIt) {
  LoneCommunicator lone;
  const std::shared_ptr<Communicator> communicator(&lone, [](Communicator*) {});
  Step step;
  float x = 3, y = 0, statistic = 5;
  const kf_tensor tensor{&x, &y, 1};
  const kf_group group{"kungfu/shards", &tensor, 1, KF_FLOAT32, nullptr};
  EXPECT_THROW(step.Take(0), Error) << "no sharded step has begun";
  EXPECT_THROW(step.Bring(&group, 1), Error);
  Plan plan;
  plan.shards = kMaxShards + 1;
  EXPECT_THROW(step.Begin(communicator, plan, {}), Error);
  plan.shards = 2;
  step.Begin(communicator, plan, {{KF_FLOAT32, &statistic, 1}});
  EXPECT_NO_THROW(step.Refuse("other", true));
  EXPECT_THROW(step.Take(2), Error);
  EXPECT_THROW(step.Bring(&group, 1), Error) << "nothing is taken";

  EXPECT_FALSE(step.NextKey()) << "no shard is computed";
  step.TakeForHashes(0);
  EXPECT_THROW(step.Refuse("other", false), Error) << "a shard is computed";
  EXPECT_EQ(step.NextKey()->place, 0u);
  EXPECT_EQ(step.NextKey()->place, 1u) << "two draws of a shard differ";
  statistic = 6;
  float weight = 4;
  step.UpdateFollows([&] { return std::vector<Written>{{&weight, sizeof weight}}; });
  y = 1;
  EXPECT_FALSE(step.Bring(&group, 1));
  EXPECT_EQ(y, 0);
  weight = 8;
  EXPECT_THROW(step.Refuse("other", false), Error) << "an update runs for nothing";
  EXPECT_THROW(step.UpdateFollows([] { return std::vector<Written>(); }), Error) << "it isn't undone yet";
  EXPECT_THROW(step.Begin(communicator, plan, {}), Error);
  step.UndoUpdate();
  EXPECT_NO_THROW(step.Refuse("other", false));
  EXPECT_EQ(weight, 4) << "it counts for nothing";
  weight = 8;
  step.UndoUpdate();
  EXPECT_EQ(weight, 8) << "nothing is undone twice";
  EXPECT_EQ(step.Hashes().size(), 1u);
  EXPECT_EQ(statistic, 5) << "it counts for nothing";
  EXPECT_EQ(step.Missing(), (Shards{0, 1}));
  EXPECT_THROW(step.NextKey(), Error) << "between the shards";

  step.Take(0);
  EXPECT_EQ(step.NextKey()->place, 0u) << "what is computed again draws the same again";
  statistic = 7;
  EXPECT_FALSE(step.Bring(&group, 1));
  EXPECT_THROW(step.Refuse("other", true), Error) << "between the shards";
  EXPECT_NO_THROW(step.Refuse("other", false));
  EXPECT_THROW(step.Take(0), Error) << "it has been brought";
  step.Take(1);
  EXPECT_EQ(statistic, 5);
  statistic = 9;
  EXPECT_TRUE(step.Bring(&group, 1));
  step.End();
  EXPECT_EQ(y, 3);
  EXPECT_EQ(statistic, 8);
  EXPECT_NO_THROW(step.Refuse("other", true));
  EXPECT_THROW(step.Bring(&group, 1), Error) << "a second sum in one step";
}

TEST(ShardsStep, MeasuresTheGradientsOfItsShardsAndTheirMean) {
  monitoring::GradientNorms& norms = monitoring::GradientNorms::Get();
  for (const bool mean : {true, false}) {
    for (const bool watched : {true, false}) {
      const Watched watching(watched);
      LoneCommunicator lone;
      Step step;
      Plan plan;
      plan.shards = 3;
      plan.last = 0.5;
      plan.mean = mean;
      step.Begin({&lone, [](Communicator*) {}}, plan, {});
      bool over = false;
      for (uint32_t shard = 0; shard < 3; shard++) {
        const float gradient[] = {float(shard + 1), float(2 * shard)}, loss = 100;
        float mean_gradient[2], mean_loss;
        const kf_tensor tensors[] = {{gradient, mean_gradient, 2}, {nullptr, nullptr, 0}, {&loss, &mean_loss, 1}};
        const double second[] = {4};
        double mean_second[1];
        const kf_tensor double_tensor{second, mean_second, 1};
        const kf_group groups[] = {{"kungfu/shards", tensors, 3, KF_FLOAT32, nullptr},
                                   {"kungfu/shards", &double_tensor, 1, KF_FLOAT64, nullptr}};
        step.Take(shard);
        over = step.Bring(groups, 2, &loss);
      }
      ASSERT_TRUE(over);
      step.End();
      const monitoring::Norms seen = norms.Take();
      // (1, 0, 4), (2, 2, 4) and (3, 4, 4), of which the last counts half.
      EXPECT_DOUBLE_EQ(seen.brought, watched ? (17 + 24 + 41) / 3.0 : 0);
      EXPECT_NEAR(seen.reduced, watched ? (4.5 * 4.5 + 4 * 4) / (2.5 * 2.5) + 16 : 0, 1e-5);
      EXPECT_EQ(seen.elements, watched ? 3u : 0u);
    }
  }
}

// As threads, so that sanitizers see what survivors do: a rank that brings no more, in any step after any number of
// shards, and is said to be dead.
TEST(ShardsStep, IsWholeWithoutARankThatStopsInTheMiddle) {
  std::mt19937 random(Seed());
  struct Stopped {};
  class Stopping : public Trainer {
   public:
    Stopping(const Training& training, Communicator& communicator, int after)
        : Trainer(training, communicator), after_(after) {}

   private:
    void Computing(bool) override {
      if (after_-- == 0) throw Stopped{};
    }
    int after_;
  };
  for (uint32_t size = 2; size <= 5; size++) {
    for (size_t shape = 0; shape < Shapes().size(); shape++) {
      const unsigned seed = random();
      const Case drawn = DrawCase(size, shape, random);
      SCOPED_TRACE(drawn.Name());
      const Training training(drawn, seed);
      const Watched watched(drawn.watched);
      std::vector<int> stops(size, -1);  // after how many shards
      for (uint32_t n = 0; n < 1 + random() % (size - 1); n++) stops[random() % size] = int(random() % 8);
      if (std::count(stops.begin(), stops.end(), -1) == 0) stops[0] = -1;
      const auto train_on = [&](auto& ranks, const auto& mark_lost) {
        std::vector<std::vector<Members>> members(size);
        std::mutex launcher;
        const auto errors = ranks.Collect([&](uint32_t rank, Communicator& communicator) {
          Stopping trainer(training, communicator, stops[rank]);
          try {
            for (int number = 0; number < kSteps; number++) members[rank].push_back(trainer.Train(number));
          } catch (const Stopped&) {
            const std::lock_guard<std::mutex> guard(launcher);
            mark_lost(rank);
          }
        });
        for (const auto& error : errors) {
          if (error) std::rethrow_exception(error);
        }
        std::set<std::vector<Members>> different;
        for (uint32_t r = 0; r < size; r++) {
          if (members[r].size() == kSteps) different.insert(members[r]);
        }
        ASSERT_EQ(different.size(), 1u) << "survivors agree on who is left";
      };
      Ranks ranks(size, {20s, 20s}, drawn.cores, /*recovers=*/true);
      train_on(ranks,
               [&](uint32_t rank) { ranks.control().MarkLost(rank, "was killed by SIGKILL", /*recover=*/true); });
      testing::Clusters cluster(SomeHosts(size, random), /*recovers=*/true, {20s, 20s});
      train_on(cluster, [&](uint32_t rank) { cluster.MarkLost(rank); });
    }
  }
}

// ---- failures, as processes

struct Results {
  struct Rank {
    std::atomic<int> points;   // places that it came to while they were counted
    std::atomic<int> stopped;  // it is at the place where it dies
    std::atomic<int> done;     // steps
    uint32_t members[kSteps];  // bit mask of MembersNow after each
    char failure[256];
  } ranks[8];
};

struct Victim {
  uint32_t rank;
  int place;                // that it comes to while `armed`
  bool inheriting = false;  // counted from when it computes a shard of a failed rank
};

Results* results = nullptr;
uint32_t my_rank = 0;
int fail_at = -1, passed = 0;
bool armed = false;

void Hook(const char*) {
  if (!armed) return;
  if (passed++ == fail_at) {
    results->ranks[my_rank].stopped = 1;
    raise(SIGKILL);
  }
  results->ranks[my_rank].points = passed;
}

class Cluster {
 public:
  Cluster(const Training& training, const std::vector<Victim>& victims) : training_(training), victims_(victims) {
    fd_ = shm::Segment::Create(training.is.size, 1, training.is.cores, /*recovers=*/true);
    std::memset(static_cast<void*>(results), 0, sizeof *results);
    for (uint32_t rank = 0; rank < training.is.size; rank++) {
      const pid_t pid = fork();
      if (pid == 0) Child(rank);
      pids_.push_back(pid);
    }
  }
  ~Cluster() { close(fd_); }

  // Returns a complaint, or nothing if all is as it should be.
  std::string Supervise() {
    shm::SegmentControlBlock launchers(std::make_shared<shm::Segment>(fd_));
    const uint32_t size = training_.is.size;
    uint32_t alive = (1u << size) - 1, left = size;
    const auto deadline = Clock::now() + 30s;
    std::string complaint;
    while (left > 0) {
      int status = 0;
      const pid_t pid = waitpid(-1, &status, WNOHANG);
      if (pid == 0) {
        if (Clock::now() > deadline && complaint.empty()) {
          for (const pid_t each : pids_) kill(each, SIGKILL);
          complaint = "they hang; ";
        }
        std::this_thread::sleep_for(100us);
        continue;
      }
      const auto rank = uint32_t(std::find(pids_.begin(), pids_.end(), pid) - pids_.begin());
      if (rank == size) continue;
      left--;
      if (WIFSIGNALED(status)) {
        alive &= ~(1u << rank);
        launchers.MarkLost(rank, "was killed by SIGKILL", /*recover=*/true, /*reaped=*/true);
      } else if (WEXITSTATUS(status) != 0) {
        complaint += Text("rank ", rank, " failed: ", results->ranks[rank].failure, "; ");
      }
    }
    if (!complaint.empty()) return complaint;
    uint32_t before = (1u << size) - 1;
    for (int number = 0; number < kSteps; number++) {
      std::set<uint32_t> different;
      uint32_t earlier = 0;  // ranks that have died in an earlier step
      for (uint32_t r = 0; r < size; r++) {
        if ((alive >> r & 1) != 0) {
          different.insert(results->ranks[r].members[number]);
        } else if (results->ranks[r].done < number) {
          earlier |= 1u << r;
        }
      }
      if (different.size() != 1) return Text("step ", number, ": ", different.size(), " opinions on who is left");
      const uint32_t members = *different.begin();
      if ((members & alive) != alive || (members & ~before) != 0 || (members & earlier) != 0) {
        return Text("step ", number, ": left are ", members, ", alive are ", alive, ", before were ", before,
                    ", dead before it were ", earlier);
      }
      before = members;
    }
    return "";
  }

 private:
  class Mortal : public Trainer {
   public:
    Mortal(const Training& training, Communicator& communicator, bool inheriting)
        : Trainer(training, communicator), inheriting_(inheriting) {
      armed = !inheriting;
    }

   private:
    void Computing(bool inherited) override {
      armed = armed || (inheriting_ && inherited);
      Hook("while a shard is computed");
    }
    const bool inheriting_;
  };

  [[noreturn]] void Child(uint32_t rank) {
    my_rank = rank;
    bool inheriting = false;
    for (const Victim& victim : victims_) {
      if (victim.rank != rank) continue;
      fail_at = victim.place;
      inheriting = victim.inheriting;
    }
    fault_hook = Hook;
    Results::Rank& mine = results->ranks[rank];
    try {
      HostCommunicator communicator(std::make_shared<shm::Segment>(fd_), rank, "", false, {20000ms, 20000ms});
      communicator.Assemble();
      Mortal trainer(training_, communicator, inheriting);
      monitoring::GradientNorms& norms = monitoring::GradientNorms::Get();
      norms.Watch(training_.is.watched ? "gradients" : "");
      for (int number = 0; number < kSteps; number++) {
        for (const uint32_t r : trainer.Train(number)) mine.members[number] |= 1u << r;
        Require(norms.Take().brought == (training_.is.watched ? training_.steps[number].norms : 0),
                Text("the norms of step ", number, " have other bits"));
        mine.done++;
      }
      communicator.Leave();
    } catch (const std::exception& error) {
      CopyText(mine.failure, error.what());
      _exit(1);
    }
    _exit(0);
  }

  const Training& training_;
  const std::vector<Victim> victims_;
  int fd_;
  std::vector<pid_t> pids_;
};

class ShardsFailures : public testing::KilledRanks<Results, results> {
 protected:
  // How many of the victims came to their places.
  static int Struck(const std::vector<Victim>& victims) {
    int struck = 0;
    for (const Victim& victim : victims) struck += results->ranks[victim.rank].stopped;
    return struck;
  }
};

std::string NameOf(const std::vector<Victim>& victims) {
  std::string name;
  for (const Victim& victim : victims) {
    name += Text("; rank ", victim.rank, " at place ", victim.place, victim.inheriting ? " since it inherited" : "");
  }
  return name;
}

// At every place with KUNGFU_KILL_EVERYWHERE in the environment, which takes long; else at some of each shape of a step
// for each number of ranks, two of which leave one that is alone afterwards.
TEST_F(ShardsFailures, AStepIsWholeWhereverOneFails) {
  std::mt19937 random(Seed());
  int kills = 0, places = 0;
  for (const uint32_t size : {3u, 2u, 4u}) {
    for (size_t shape = 0; shape < Shapes().size(); shape++) {
      const Case drawn = DrawCase(size, shape, random);
      SCOPED_TRACE(drawn.Name());
      const Training training(drawn, random());
      ASSERT_EQ(Cluster(training, {}).Supervise(), "");
      std::vector<Victim> victims;
      for (uint32_t r = 0; r < size; r++) {
        for (int place = 0; place < results->ranks[r].points; place++) victims.push_back({r, place});
      }
      std::shuffle(victims.begin(), victims.end(), random);
      places += int(victims.size());
      const int enough = 3;
      int here = 0;
      for (size_t i = 0; i < victims.size() && (Everywhere() || here < enough); i++) {
        ASSERT_EQ(Cluster(training, {victims[i]}).Supervise(), "") << NameOf({victims[i]});
        here += Struck({victims[i]});
      }
      EXPECT_GT(here, 0);
      kills += here;
    }
  }
  std::printf("killed at %d of %d places\n", kills, places);
}

// Anywhere, and, every other time, the second one where the shards of the first are assigned to it.
TEST_F(ShardsFailures, AStepIsWholeWhereverTwoFail) {
  std::mt19937 random(Seed());
  int rounds = 0, both = 0, heirs = 0;
  for (const int enough = Everywhere() ? 2000 : 36; rounds < enough; rounds++) {
    const uint32_t size = 4 + random() % 2;
    Case drawn = DrawCase(size, random() % Shapes().size(), random);
    const bool inheriting = rounds % 2 == 0;
    if (inheriting) drawn.plan.shards = std::max(drawn.plan.shards, 3 * size);  // for each survivor one at least
    SCOPED_TRACE(drawn.Name());
    const Training training(drawn, random());
    const uint32_t first = random() % size, second = (first + 1 + random() % (size - 1)) % size;
    const std::vector<Victim> victims = {{first, int(random() % 20)},
                                         {second, int(random() % (inheriting ? 6 : 40)), inheriting}};
    ASSERT_EQ(Cluster(training, victims).Supervise(), "") << NameOf(victims);
    const int struck = Struck(victims);
    both += struck == 2 ? 1 : 0;
    heirs += struck == 2 && inheriting ? 1 : 0;
  }
  std::printf("%d rounds, both struck in %d, the second as an heir in %d\n", rounds, both, heirs);
  EXPECT_GT(heirs, 0);
}

}  // namespace
}  // namespace kungfu::shards
