// The model store: versions, whole reads under a writer that doesn't stop, writers that die, whose turn it is.
#include "store/model_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <numeric>
#include <set>
#include <thread>

#include "base/error.h"
#include "runtime/peer.h"
#include "store/peer_store.h"

namespace kungfu::store {
namespace {

// A model of three tensors, the last of which ends within a word; every element says its version.
struct Model {
  explicit Model(uint64_t version = 0) : a(1000), b(1), c(1003) { Fill(version); }
  void Fill(uint64_t version) {
    for (size_t i = 0; i < a.size(); i++) a[i] = version * 10000 + i;
    b[0] = version * 10000;
    for (size_t i = 0; i < c.size(); i++) c[i] = static_cast<char>(version + i);
  }
  std::vector<kf_blob> Blobs() {
    return {{a.data(), a.size() * sizeof(uint64_t)}, {b.data(), b.size() * sizeof(uint64_t)}, {c.data(), c.size()}};
  }
  bool operator==(const Model& other) const { return a == other.a && b == other.b && c == other.c; }
  std::vector<uint64_t> a, b;
  std::vector<char> c;
};

uint64_t Save(ModelStore& store, const std::string& name, Model& model) {
  const auto blobs = model.Blobs();
  return store.Save(name, "three", blobs.data(), blobs.size());
}

uint64_t Request(const StoreView& view, const std::string& name, Model& model, const char* layout = "three") {
  const auto blobs = model.Blobs();
  return view.Request(name, layout, blobs.data(), blobs.size());
}

template <typename Body>
Error ErrorOf(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  return Error(KF_OK, "nothing was thrown");
}

TEST(ModelStore, AForkedChildSavesNothingInItsParentsName) {
  ModelStore store;
  Model model(1);
  ASSERT_EQ(Save(store, "m", model), 1u);
  (void)Peer::Get().store();  // the parent's
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    Model other(2);
    const bool own = ErrorOf([&] { Save(store, "m", other); }).status() == KF_INVALID;
    const auto blobs = other.Blobs();
    const bool all =
        ErrorOf([&] { Peer::Get().store().Save("m", "three", blobs.data(), blobs.size()); }).status() == KF_INVALID;
    _exit(own && all ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(StoreView(store.fd(), /*own=*/true).Describe("m").version, 1u);
  EXPECT_EQ(Save(store, "m", model), 2u);
}

TEST(ModelStore, GivesTheLatestVersionOfEachName) {
  ModelStore store;
  const StoreView view(store.fd(), /*own=*/true);
  Model got(99);
  EXPECT_EQ(Request(view, "m", got), 0u);
  EXPECT_EQ(got, Model(99));  // untouched
  for (uint64_t version = 1; version <= 5; version++) {
    Model model(version);
    EXPECT_EQ(Save(store, "m", model), version);
    EXPECT_EQ(Request(view, "m", got), version);
    EXPECT_EQ(got, Model(version));
  }
  // A name that comes later, in a file that has grown since the view was made.
  Model other(7);
  EXPECT_EQ(Save(store, "other", other), 1u);
  EXPECT_EQ(Request(view, "other", got), 1u);
  EXPECT_EQ(got, Model(7));
  EXPECT_EQ(view.Describe("m").version, 5u);
  EXPECT_EQ(view.Describe("m").layout, "three");
  EXPECT_EQ(view.Describe("m").bytes, 1000 * 8 + 8 + 1003u);
  EXPECT_EQ(view.Describe("nobody").version, 0u);
}

TEST(ModelStore, TakesEmptyTensorsAndNone) {
  ModelStore store;
  const StoreView view(store.fd(), /*own=*/true);
  const kf_blob empty{nullptr, 0};
  EXPECT_EQ(store.Save("empty", "", &empty, 1), 1u);
  EXPECT_EQ(store.Save("none", "", nullptr, 0), 1u);
  EXPECT_EQ(view.Request("empty", "", &empty, 1), 1u);
  EXPECT_EQ(view.Request("none", "", nullptr, 0), 1u);
}

TEST(ModelStore, RefusesAnotherLayout) {
  ModelStore store;
  const StoreView view(store.fd(), /*own=*/true);
  Model model(1);
  Save(store, "m", model);
  char byte = 0;
  const kf_blob small{&byte, 1};
  EXPECT_EQ(ErrorOf([&] { store.Save("m", "three", &small, 1); }).status(), KF_INVALID);
  EXPECT_EQ(ErrorOf([&] { view.Request("m", "three", &small, 1); }).status(), KF_INVALID);
  EXPECT_EQ(ErrorOf([&] { Request(view, "m", model, "four"); }).status(), KF_INVALID);
  EXPECT_EQ(ErrorOf([&] { store.Save("", "", &small, 1); }).status(), KF_INVALID);
  EXPECT_EQ(ErrorOf([&] { store.Save(std::string(200, 'x'), "", &small, 1); }).status(), KF_INVALID);
  EXPECT_EQ(ErrorOf([&] { store.Save("x", std::string(300, 'x'), &small, 1); }).status(), KF_INVALID);
  // The refusals left no trace.
  EXPECT_EQ(Save(store, "m", model), 2u);
  for (uint32_t i = 1; i < kRecords; i++) store.Save("n" + std::to_string(i), "", &small, 1);
  EXPECT_EQ(ErrorOf([&] { store.Save("one too many", "", &small, 1); }).status(), KF_INVALID);
}

TEST(ModelStore, RefusesMemoryThatIsNoStore) {
  const int fd = memfd_create("test", MFD_CLOEXEC);
  EXPECT_EQ(ErrorOf([&] { StoreView view(fd); }).status(), KF_INTERNAL);
  ASSERT_EQ(ftruncate(fd, 1 << 20), 0);
  EXPECT_EQ(ErrorOf([&] { StoreView view(fd); }).status(), KF_INTERNAL);
  close(fd);
}

TEST(ModelStore, OthersCanOnlyRead) {
  ModelStore store;
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, store.fd(), 0), MAP_FAILED);
}

TEST(ModelStore, ReadsAreWholeWhileTheOwnerSavesWithoutPause) {
  ModelStore store;
  const StoreView view(store.fd(), /*own=*/true);
  Model first(1);
  Save(store, "m", first);
  std::atomic<bool> stop{false};
  std::thread owner([&] {
    for (uint64_t version = 2; !stop; version++) {
      Model model(version);
      EXPECT_EQ(Save(store, "m", model), version);
    }
  });
  std::vector<std::thread> readers;
  for (int r = 0; r < 3; r++) {
    readers.emplace_back([&] {
      uint64_t last = 0;
      Model got, expected;
      for (int i = 0; i < 2000; i++) {
        const uint64_t version = Request(view, "m", got);
        EXPECT_GE(version, last);
        last = version;
        expected.Fill(version);
        ASSERT_EQ(got, expected) << "a torn read of version " << version;
      }
    });
  }
  for (auto& reader : readers) reader.join();
  stop = true;
  owner.join();
}

// Reads what another process saves, and goes on when that is killed, wherever it was.
TEST(ModelStore, AWriterThatIsKilledLeavesWholeModels) {
  for (int round = 0; round < 20; round++) {
    int pipe_to_us[2];
    ASSERT_EQ(pipe(pipe_to_us), 0);
    // Made by the child, whose lock it is; handed over through the pipe's other end in /proc.
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ModelStore store;
      Model model(1);
      Save(store, "m", model);
      const int fd = store.fd();
      if (write(pipe_to_us[1], &fd, sizeof(fd)) != sizeof(fd)) _exit(1);
      for (uint64_t version = 2;; version++) {
        model.Fill(version);
        Save(store, "m", model);
      }
    }
    int their_fd = -1;
    ASSERT_EQ(read(pipe_to_us[0], &their_fd, sizeof(their_fd)), ssize_t(sizeof(their_fd)));
    const std::string path = "/proc/" + std::to_string(child) + "/fd/" + std::to_string(their_fd);
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    const StoreView view(fd);
    close(fd);
    close(pipe_to_us[0]);
    close(pipe_to_us[1]);
    EXPECT_TRUE(view.OwnerLives());
    Model got, expected;
    uint64_t version = 0;
    while (version < 5u + static_cast<uint64_t>(round)) version = Request(view, "m", got);
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_FALSE(view.OwnerLives());
    const uint64_t last = Request(view, "m", got);
    EXPECT_GE(last, version);
    expected.Fill(last);
    EXPECT_EQ(got, expected);
  }
}

TEST(NeighbourChoice, IsUniformOverTheOthersAndOverThoseThatCanBeTaken) {
  constexpr int kDraws = 60000;
  NeighbourChoice all(KF_RANDOM, 1), some(KF_RANDOM, 2);
  std::map<int64_t, int> seen, seen_of_some;
  for (int i = 0; i < kDraws; i++) {
    seen[all.Choose(2, 7, [](uint32_t) { return true; })]++;
    seen_of_some[some.Choose(0, 5, [](uint32_t other) { return other != 3; })]++;
  }
  EXPECT_EQ(seen.size(), 6u);
  EXPECT_EQ(seen.count(2), 0u);
  EXPECT_EQ(seen_of_some.size(), 3u);
  // Chi-square: 5 and 2 degrees of freedom at p = 1e-5.
  const auto chi_square = [](const std::map<int64_t, int>& counts) {
    const double expected = double(kDraws) / double(counts.size());
    double sum = 0;
    for (const auto& [rank, count] : counts) sum += (count - expected) * (count - expected) / expected;
    return sum;
  };
  EXPECT_LT(chi_square(seen), 30.9);
  EXPECT_LT(chi_square(seen_of_some), 23.1);
}

TEST(NeighbourChoice, GoesRoundAndPassesOverThoseThatCantBeTaken) {
  NeighbourChoice choice(KF_ROUND_ROBIN, 0);
  std::vector<int64_t> seen;
  for (int i = 0; i < 6; i++) seen.push_back(choice.Choose(1, 4, [](uint32_t) { return true; }));
  EXPECT_EQ(seen, (std::vector<int64_t>{2, 3, 0, 2, 3, 0}));
  EXPECT_EQ(choice.Choose(1, 4, [](uint32_t other) { return other == 0; }), 0);
  EXPECT_EQ(choice.Choose(0, 1, [](uint32_t) { return true; }), -1);
  std::multiset<uint32_t> asked;
  EXPECT_EQ(choice.Choose(0, 4, [&](uint32_t other) { return asked.insert(other), false; }), -1);
  EXPECT_EQ(asked, (std::multiset<uint32_t>{1, 2, 3}));
  NeighbourChoice random(KF_RANDOM, 0);
  EXPECT_EQ(random.Choose(0, 1, [](uint32_t) { return true; }), -1);
  EXPECT_EQ(random.Choose(0, 3, [](uint32_t) { return false; }), -1);
}

// Rank 0 of a few, each with a store; the exchange under test is rank 0's.
struct Group {
  explicit Group(uint32_t size) {
    for (uint32_t r = 0; r < size; r++) {
      stores.push_back(std::make_unique<ModelStore>());
      views.push_back(std::make_shared<StoreView>(stores.back()->fd(), /*own=*/true));
    }
  }
  Exchange::Views Views() {
    return [this](uint32_t rank) { return views[rank]; };
  }
  Source Take(Exchange& exchange, Model& into, uint64_t cluster_version = 1) {
    const auto blobs = into.Blobs();
    return exchange.Take({cluster_version, 0, uint32_t(stores.size())}, Views(), "three", blobs.data(), blobs.size());
  }
  void Begin(Exchange& exchange, uint64_t cluster_version = 1) {
    std::vector<uint64_t> sizes;
    Model model;
    for (const kf_blob& blob : model.Blobs()) sizes.push_back(blob.nbytes);
    exchange.Begin({cluster_version, 0, uint32_t(stores.size())}, Views(), "three", sizes);
  }
  std::vector<std::unique_ptr<ModelStore>> stores;
  std::vector<std::shared_ptr<StoreView>> views;
};

TEST(Exchange, TakesWhatWasThereWhenItBegan) {
  Group group(2);
  Exchange exchange("m", KF_ROUND_ROBIN, 0);
  Model got(99), model(1);
  EXPECT_EQ(group.Take(exchange, got).rank, -1);  // rank 1 has saved nothing yet
  EXPECT_EQ(got, Model(99));
  Save(*group.stores[1], "m", model);
  Source source = group.Take(exchange, got);  // and now without having begun before
  EXPECT_EQ(source.rank, 1);
  EXPECT_EQ(source.version, 1u);
  EXPECT_EQ(got, Model(1));
  group.Begin(exchange);
  group.Begin(exchange);  // waits for the first
  model.Fill(2);
  Save(*group.stores[1], "m", model);
  source = group.Take(exchange, got);
  Model expected(source.version);
  EXPECT_GE(source.version, 1u);
  EXPECT_EQ(got, expected);
  EXPECT_EQ(group.Take(exchange, got).version, 2u);
}

TEST(Exchange, DropsWhatBelongsToAnOlderCluster) {
  Group group(2);
  Exchange exchange("m", KF_RANDOM, 3);
  Model got, model(1);
  Save(*group.stores[1], "m", model);
  group.Begin(exchange, /*cluster_version=*/1);
  model.Fill(2);
  // The exchange is idle, and has version 1, once this returns.
  while (group.views[1]->Describe("m").version < 2) Save(*group.stores[1], "m", model);
  EXPECT_EQ(group.Take(exchange, got, /*cluster_version=*/2).version, 2u);
}

// Of another host, whose answer is known when it is asked.
struct FarView : ModelView {
  explicit FarView(uint64_t its_version) : version(its_version) {}
  bool IsHere() const override { return false; }
  bool OwnerLives() const override { return true; }
  Description Describe(const std::string&) const override { return {"three", 0, version}; }
  uint64_t Request(const std::string&, const std::string&, const kf_blob* blobs, size_t) const override {
    asked++;
    if (version == UINT64_MAX) throw Error(KF_STALE, "the cluster has changed");
    if (version > 0) static_cast<char*>(blobs[0].data)[0] = static_cast<char>(version);
    return version;
  }
  const uint64_t version;
  mutable std::atomic<int> asked{0};
};

// It was fetched while the cluster before was, and the present rank 1 has another one.
TEST(Exchange, TakesNothingThatWasFetchedInAnOlderCluster) {
  const auto before = std::make_shared<FarView>(1), after = std::make_shared<FarView>(2);
  const auto only = [](std::shared_ptr<ModelView> view) { return [view](uint32_t) { return view; }; };
  Exchange exchange("m", KF_RANDOM, 3);
  Model got;
  const auto blobs = got.Blobs();
  std::vector<uint64_t> sizes;
  for (const kf_blob& blob : blobs) sizes.push_back(blob.nbytes);
  exchange.Begin({1, 0, 2}, only(before), "three", sizes);
  while (before->asked == 0) std::this_thread::yield();
  EXPECT_EQ(exchange.Take({2, 0, 2}, only(after), "three", blobs.data(), blobs.size()).version, 2u);
}

// Rank 0's neighbours: 1 and 4 have no model, 2, 3 and 5 have one; 3 and 4 are on its host.
struct FarGroup {
  explicit FarGroup(kf_neighbour kind, uint64_t seed) : exchange("m", kind, seed) {
    Model model(7);
    Save(store, "m", model);
    views = {{1, std::make_shared<FarView>(0)},
             {2, std::make_shared<FarView>(2)},
             {3, std::make_shared<StoreView>(store.fd(), /*own=*/true)},
             {5, std::make_shared<FarView>(5)},
             {6, std::make_shared<FarView>(UINT64_MAX)}};
  }
  Source Take() {
    const auto blobs = got.Blobs();
    const auto find = [this](uint32_t rank) { return views.count(rank) > 0 ? views[rank] : nullptr; };
    return exchange.Take({1, 0, 7}, find, "three", blobs.data(), blobs.size());
  }
  ModelStore store;
  std::map<uint32_t, std::shared_ptr<ModelView>> views;
  Model got;
  Exchange exchange;
};

TEST(Exchange, RanksOfOtherHostsHaveTheirTurn) {
  FarGroup group(KF_ROUND_ROBIN, 0);
  for (const int64_t rank : {2, 3, 5, 2, 3, 5, 2, 3}) {
    const Source source = group.Take();
    EXPECT_EQ(source.rank, rank);
    EXPECT_EQ(source.version, rank == 3 ? 1 : uint64_t(rank));
    if (rank == 3) {
      EXPECT_EQ(group.got, Model(7));
    } else {
      EXPECT_EQ(reinterpret_cast<char*>(group.got.a.data())[0], char(rank));
    }
  }
}

TEST(Exchange, RanksOfOtherHostsAreAsLikely) {
  constexpr int kDraws = 6000;
  FarGroup group(KF_RANDOM, 5);
  std::map<int64_t, int> seen;
  for (int i = 0; i < kDraws; i++) seen[group.Take().rank]++;
  ASSERT_EQ(seen.size(), 3u);
  double sum = 0;  // chi-square with 2 degrees of freedom, at p = 1e-5
  for (const auto& [rank, count] : seen) sum += (count - kDraws / 3.0) * (count - kDraws / 3.0) / (kDraws / 3.0);
  EXPECT_LT(sum, 23.1);
}

TEST(Exchange, ReadIsEmptyIfNoOtherHostHasAModel) {
  FarGroup group(KF_RANDOM, 1);
  for (const uint32_t rank : {2u, 3u, 5u}) group.views.erase(rank);
  group.got.Fill(99);
  EXPECT_EQ(group.Take().rank, -1);
  EXPECT_EQ(group.got, Model(99));
}

TEST(Exchange, APeerWithAnotherModelIsAsGoodAsNone) {
  Group group(2);
  Exchange exchange("m", KF_RANDOM, 3);
  char byte = 1;
  const kf_blob blob{&byte, 1};
  group.stores[1]->Save("m", "one", &blob, 1);
  Model got(99);
  EXPECT_EQ(group.Take(exchange, got).rank, -1);
  EXPECT_EQ(got, Model(99));
}

}  // namespace
}  // namespace kungfu::store
