// Models of other hosts: whole reads over TCP, whose owners, hosts, askers and cluster versions come to their end.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/interrupt.h"
#include "hosts.h"
#include "killed_ranks.h"
#include "store/model_transport.h"
#include "store/other_hosts.h"

namespace kungfu::testing::models {
namespace {

using store::ModelStore;
using store::ModelTransport;
using store::ModelView;
using store::OtherHosts;
using store::StoreView;

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr size_t kSmall = 100;      // words
constexpr size_t kLarge = 100'003;  // more than goes unasked, and than a frame

// Two tensors, the second of which ends within a word; every element says whose and which version it is.
struct Model {
  explicit Model(size_t words) : a(words), b(13) {}
  Model(size_t words, uint32_t rank, uint64_t version) : Model(words) {
    for (size_t i = 0; i < a.size(); i++) a[i] = version << 32 | rank << 24 | (i & 0xffffff);
    for (size_t i = 0; i < b.size(); i++) b[i] = static_cast<char>(version + rank + i);
  }
  std::vector<kf_blob> Blobs() { return {{a.data(), a.size() * sizeof(uint64_t)}, {b.data(), b.size()}}; }
  bool operator==(const Model& other) const { return a == other.a && b == other.b; }
  std::vector<uint64_t> a;
  std::vector<char> b;
};

uint64_t Save(ModelStore& store, const std::string& name, size_t words, uint32_t rank, uint64_t version) {
  Model model(words, rank, version);
  const auto blobs = model.Blobs();
  return store.Save(name, "two", blobs.data(), blobs.size());
}

uint64_t Request(const ModelView& view, const std::string& name, Model& into, const char* layout = "two") {
  const auto blobs = into.Blobs();
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

template <typename Condition>
void Await(const Condition& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// A transport a host and a store a rank, all in this process.
class Models {
 public:
  explicit Models(const std::vector<uint32_t>& host_of_rank, Ends ends, std::chrono::milliseconds timeout = kTimeout)
      : places_(host_of_rank), timeout_(timeout) {
    for (uint32_t r = 0; r < places_.ranks(); r++) stores_.push_back(std::make_unique<ModelStore>());
    for (uint32_t h = 0; h < places_.hosts(); h++) {
      transports_.push_back(std::make_unique<ModelTransport>(places_, h, std::move(ends[h]), [this](uint32_t rank) {
        return std::make_shared<StoreView>(stores_[rank]->fd(), /*own=*/true);
      }));
    }
    for (uint32_t r = 0; r < places_.ranks(); r++) {
      const int fd = transports_[places_.HostOf(r)]->Connect();
      others_.push_back(std::make_shared<OtherHosts>(fd, places_, r, timeout_));
      close(fd);
    }
  }
  explicit Models(const std::vector<uint32_t>& host_of_rank)
      : Models(host_of_rank, Connect(hosts::Places(host_of_rank).hosts(), 1)) {}

  const hosts::Places& places() const { return places_; }
  ModelStore& store(uint32_t rank) { return *stores_[rank]; }
  ModelTransport& transport(uint32_t host) { return *transports_[host]; }
  void End(uint32_t host) { transports_[host] = nullptr; }
  OtherHosts& others(uint32_t rank) { return *others_[rank]; }
  // Rank `from`'s models, as `rank` reaches them.
  std::shared_ptr<ModelView> View(uint32_t rank, uint32_t from) { return OtherHosts::ViewOf(others_[rank], from); }

 private:
  const hosts::Places places_;
  const std::chrono::milliseconds timeout_;
  std::vector<std::unique_ptr<ModelStore>> stores_;
  std::vector<std::unique_ptr<ModelTransport>> transports_;
  std::vector<std::shared_ptr<OtherHosts>> others_;
};

TEST(ModelsOfOtherHosts, TheLatestVersionOfEachNameIsGivenWhole) {
  Models models({0, 1, 1, 2});
  EXPECT_TRUE(models.others(0).Have(1));
  EXPECT_FALSE(models.others(1).Have(2));
  EXPECT_FALSE(models.others(1).Have(4));
  for (const auto& [rank, from] : {std::pair{0, 2}, {2, 0}, {1, 3}}) {
    const auto view = models.View(rank, from);
    Model untouched(kSmall, 9, 9);
    EXPECT_EQ(Request(*view, "0", untouched), 0u);  // nothing is saved yet
    EXPECT_EQ(untouched, Model(kSmall, 9, 9));
    EXPECT_EQ(view->Describe("0").version, 0u);
    for (const size_t words :
         {size_t{0}, size_t{1}, kSmall, ModelTransport::kSmallBytes / 8 - 8, ModelTransport::kSmallBytes / 8, kLarge}) {
      const std::string name = std::to_string(words);
      for (uint64_t version = 1; version <= 3; version++) {
        ASSERT_EQ(Save(models.store(from), name, words, from, version), version);
        EXPECT_EQ(view->Describe(name).version, version);
        EXPECT_EQ(view->Describe(name).layout, "two");
        EXPECT_EQ(view->Describe(name).bytes, 8 * words + 13);
        Model got(words);
        ASSERT_EQ(Request(*view, name, got), version);
        EXPECT_EQ(got, Model(words, from, version));
      }
    }
    EXPECT_EQ(models.store(from).Save("none", "", nullptr, 0), 1u);
    EXPECT_EQ(view->Request("none", "", nullptr, 0), 1u);
  }
}

TEST(ModelsOfOtherHosts, UnfitModelRequestIsRefusedAndBreaksNothing) {
  Models models({0, 1});
  const auto view = models.View(0, 1);
  Save(models.store(1), "m", kSmall, 1, 1);
  const StoreView near(models.store(1).fd(), /*own=*/true);
  Model other(kSmall + 1), right(kSmall);
  for (const ModelView* each : {static_cast<const ModelView*>(&near), static_cast<const ModelView*>(view.get())}) {
    EXPECT_EQ(ErrorOf([&] { Request(*each, "m", other); }).status(), KF_INVALID);
    EXPECT_EQ(ErrorOf([&] { Request(*each, "m", right, "three"); }).status(), KF_INVALID);
    EXPECT_EQ(Request(*each, std::string(500, 'x'), right), 0u);
    EXPECT_EQ(Request(*each, "", right), 0u);
    EXPECT_EQ(Request(*each, "m", right), 1u);
  }
  const std::string here = ErrorOf([&] { Request(near, "m", other); }).what();
  EXPECT_EQ(ErrorOf([&] { Request(*view, "m", other); }).what(), here);
}

// Owners save without pause, and readers of all hosts read small and large models side by side.
TEST(ModelsOfOtherHosts, ReadsAreWholeAndNeverGoBack) {
  Models models({0, 0, 1, 2, 2});
  const uint32_t ranks = models.places().ranks();
  const std::map<std::string, size_t> names = {{"small", kSmall}, {"large", kLarge}};
  for (uint32_t r = 0; r < ranks; r++) {
    for (const auto& [name, words] : names) Save(models.store(r), name, words, r, 1);
  }
  std::atomic<bool> stop{false};
  std::thread owner([&] {
    for (uint64_t version = 2; !stop; version++) {
      for (uint32_t r = 0; r < ranks; r++) {
        for (const auto& [name, words] : names) Save(models.store(r), name, words, r, version);
      }
    }
  });
  const auto errors = CollectOf(2 * ranks, [&](uint32_t thread) {
    const uint32_t rank = thread / 2;
    std::mt19937 random(thread);
    std::map<std::pair<uint32_t, std::string>, uint64_t> last;
    for (uint32_t i = 0; i < 100 / kSlower; i++) {
      const uint32_t from = random() % ranks;
      if (!models.others(rank).Have(from)) continue;
      const auto& [name, words] = *std::next(names.begin(), random() % 2);
      Model got(words);
      const uint64_t version = Request(*models.View(rank, from), name, got);
      ASSERT_GE(version, std::max<uint64_t>((last[{from, name}]), 1));
      last[{from, name}] = version;
      ASSERT_EQ(got, Model(words, from, version)) << "a torn read of version " << version;
    }
  });
  stop = true;
  owner.join();
  RethrowFirst(errors);
}

// Hosts are lost while all read from all: their end comes first (a kill), or the decision (a cut). The rest reads
// on; of the lost there is nothing once they are known as such, and before that what is whole, or nothing.
TEST(ModelsOfOtherHosts, RemainingHostsReadOnIfOthersAreLost) {
  std::mt19937 random(Seed());
  for (uint32_t i = 0; i < std::max(15 / kSlower, 2u); i++) {
    Models models({0, 0, 1, 2, 2, 3});
    const uint32_t ranks = models.places().ranks(), hosts = models.places().hosts();
    for (uint32_t r = 0; r < ranks; r++) {
      Save(models.store(r), "small", kSmall, r, 1);
      Save(models.store(r), "large", kLarge, r, 1);
    }
    const uint32_t lost = random() % hosts, after = random() % 40;
    const bool killed = random() % 2 == 0;
    const uint32_t again = random();
    std::atomic<uint32_t> reads{0};
    std::atomic<bool> told{false};
    const auto errors = CollectOf(ranks + 1, [&](uint32_t rank) {
      if (rank == ranks) {
        Await([&] { return reads >= after; });
        if (killed) models.End(lost);
        for (uint32_t h = 0; h < hosts; h++) {
          if (h != lost) models.transport(h).LoseHost(lost);
        }
        told = true;
        return;
      }
      std::mt19937 own(again + rank);
      const bool is_lost = models.places().HostOf(rank) == lost;
      for (uint32_t more = 0; more < 12;) {
        const bool known = told;  // before the request
        if (known) more++;
        const uint32_t from = own() % ranks;
        if (!models.others(rank).Have(from)) continue;
        const bool large = own() % 2 == 0;
        Model got(large ? kLarge : kSmall);
        uint64_t version = 0;
        try {
          version = Request(*models.View(rank, from), large ? "large" : "small", got);
        } catch (const Error& error) {
          ASSERT_TRUE(is_lost && killed && error.status() == KF_STALE) << error.what();
          return;
        }
        reads++;
        if (version != 0) {
          ASSERT_EQ(got, Model(large ? kLarge : kSmall, from, 1));
        }
        if (is_lost) continue;
        if (models.places().HostOf(from) != lost) {
          ASSERT_EQ(version, 1u);
        } else if (known) {
          ASSERT_EQ(version, 0u);
        }
      }
    });
    RethrowFirst(errors);
    if (HasFatalFailure()) return;
    for (uint32_t h = 0; h < hosts; h++) {
      if (h == lost) continue;
      EXPECT_TRUE(models.transport(h).Unreachable().empty());  // it knows about that one
    }
  }
}

TEST(ModelsOfOtherHosts, AHostWhoseConnectionEndsIsReportedAndHasNoModels) {
  Models models({0, 1, 2});
  Save(models.store(1), "m", kLarge, 1, 1);
  Save(models.store(2), "m", kLarge, 2, 1);
  models.End(1);
  Model got(kLarge);
  EXPECT_EQ(Request(*models.View(0, 1), "m", got), 0u);
  EXPECT_EQ(Request(*models.View(0, 2), "m", got), 1u);
  Await([&] { return !models.transport(0).Unreachable().empty(); });
  EXPECT_EQ(models.transport(0).Unreachable()[0].first, 1u);
  models.transport(0).LoseHost(1);
  EXPECT_TRUE(models.transport(0).Unreachable().empty());
  EXPECT_EQ(Request(*models.View(0, 1), "m", got), 0u);
}

// Of a version that is over all are told so, wherever their requests are.
TEST(ModelsOfOtherHosts, TheEndOfTheVersionEndsAllRequests) {
  for (uint32_t i = 0; i < std::max(15 / kSlower, 2u); i++) {
    Models models({0, 0, 0, 1, 1});
    for (uint32_t r = 0; r < 5; r++) Save(models.store(r), "m", r % 2 == 0 ? kLarge : kSmall, r, 1);
    std::atomic<uint32_t> reads{0};
    const auto errors = CollectOf(6, [&](uint32_t rank) {
      if (rank == 5) {
        Await([&] { return reads >= i; });
        if (i % 3 == 0) models.others(0).Close();  // by itself, as a worker that goes on to the next one does
        models.End(i % 2);
        models.End(1 - i % 2);
        return;
      }
      const uint32_t from = rank < 3 ? 3 + rank % 2 : rank % 3;
      for (;;) {
        Model got(from % 2 == 0 ? kLarge : kSmall);
        uint64_t version = 1;
        const Error error = ErrorOf([&] { version = Request(*models.View(rank, from), "m", got); });
        reads++;
        if (error.status() == KF_STALE) return;
        ASSERT_EQ(error.status(), KF_OK) << error.what();
        if (version != 0) {  // 0: the other one was first to end
          ASSERT_EQ(got, Model(got.a.size(), from, 1));
        }
      }
    });
    RethrowFirst(errors);
  }
}

// The other end of a connection that no thread serves: a host that stands still.
struct Silent {
  explicit Silent(std::chrono::milliseconds timeout = kTimeout) {
    Ends ends = Connect(3, 1);
    far = ends[1][0].connections[0];
    toward_far = ends[1][2].connections[0];
    std::vector<std::vector<tcp::HostEnds>> two = {ends[0], ends[2]};
    const hosts::Places places({0, 1, 2});
    const auto find = [this](uint32_t rank) { return std::make_shared<StoreView>(stores[rank].fd(), /*own=*/true); };
    for (const uint32_t host : {0u, 2u}) {
      transports[host] = std::make_unique<ModelTransport>(places, host, ends[host], find);
      const int fd = transports[host]->Connect();
      others[host] = std::make_shared<OtherHosts>(fd, places, host, timeout);
      close(fd);
    }
  }
  ~Silent() {
    close(far);
    close(toward_far);
  }
  int far, toward_far;
  ModelStore stores[3];
  std::map<uint32_t, std::unique_ptr<ModelTransport>> transports;
  std::map<uint32_t, std::shared_ptr<OtherHosts>> others;
};

TEST(ModelsOfOtherHosts, PausedHostIsAwaitedOnlyByItsOwnReaders) {
  Silent silent(std::chrono::milliseconds(1000));
  Save(silent.stores[2], "m", kLarge, 2, 1);
  Model got(kLarge);
  const auto still = OtherHosts::ViewOf(silent.others[0], 1), lively = OtherHosts::ViewOf(silent.others[0], 2);
  const Error error = ErrorOf([&] { Request(*still, "m", got); });
  EXPECT_EQ(error.status(), KF_TIMEOUT);
  EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
  EXPECT_EQ(Request(*lively, "m", got), 1u);
  EXPECT_EQ(ErrorOf([&] { Request(*still, "m", got); }).status(), KF_TIMEOUT);  // behind the first
  EXPECT_EQ(Request(*lively, "m", got), 1u);
  silent.transports[0]->LoseHost(1);
  EXPECT_EQ(Request(*still, "m", got), 0u);
}

TEST(ModelsOfOtherHosts, AWaitEndsWithALossTheVersionOrASignal) {
  for (const int how : {0, 1, 2, 3}) {
    Silent silent;
    static std::atomic<bool> interrupted;
    interrupted = false;
    const auto errors = CollectOf(3, [&](uint32_t thread) {
      if (thread < 2) {  // the second waits for its turn
        const InterruptCheck check([] {
          if (interrupted) throw Interrupted("a test");
        });
        Model got(kLarge);
        const auto view = OtherHosts::ViewOf(silent.others[0], 1);
        EXPECT_EQ(Request(*view, "m", got), 0u);
        return;
      }
      if (how == 0) silent.transports[0]->LoseHost(1);
      if (how == 1) silent.transports[0]->Close();
      if (how == 2) silent.others[0]->Close();
      interrupted = how == 3;
    });
    for (const uint32_t thread : {0, 1}) {
      const Error error = ErrorOf([&] {
        if (errors[thread]) std::rethrow_exception(errors[thread]);
      });
      EXPECT_EQ(error.status(), how == 0 ? KF_OK : how == 3 ? KF_ABORTED : KF_STALE) << error.what();
    }
  }
}

// Owners are processes of their own, which are killed while others read.
TEST(ModelsOfOtherHosts, AnOwnerThatIsKilledHasNoModelsAnyMore) {
  int from_child[2];
  ASSERT_EQ(pipe(from_child), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ModelStore store;
    Save(store, "m", kLarge, 1, 1);
    const int fd = store.fd();
    if (write(from_child[1], &fd, sizeof fd) != sizeof fd) _exit(1);
    for (uint64_t version = 2;; version++) Save(store, "m", kLarge, 1, version);
  }
  int fd = -1;
  ASSERT_EQ(read(from_child[0], &fd, sizeof fd), ssize_t(sizeof fd));
  close(from_child[0]);
  close(from_child[1]);
  const std::string path = "/proc/" + std::to_string(child) + "/fd/" + std::to_string(fd);
  const int store = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(store, 0);
  const hosts::Places places({0, 1});
  Ends ends = Connect(2, 1);
  ModelTransport near(places, 0, std::move(ends[0]), [](uint32_t) { return nullptr; });
  ModelTransport far(places, 1, std::move(ends[1]),
                     [&](uint32_t) { return StoreView::Take(fcntl(store, F_DUPFD_CLOEXEC, 0)); });
  const int socket = near.Connect();
  const auto others = std::make_shared<OtherHosts>(socket, places, 0, kTimeout);
  close(socket);
  const auto view = OtherHosts::ViewOf(others, 1);
  std::thread killer;
  uint64_t last = 0;
  for (uint32_t i = 0;; i++) {
    if (i == 10) killer = std::thread([&] { kill(child, SIGKILL); });
    Model got(kLarge);
    const uint64_t version = Request(*view, "m", got);
    if (version == 0) break;
    ASSERT_GE(version, last);
    last = version;
    ASSERT_EQ(got, Model(kLarge, 1, version));
  }
  killer.join();
  EXPECT_GE(last, 1u);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(view->Describe("m").version, 0u);
  close(store);
}

store::Ask AskFor(uint32_t rank, uint64_t padded) {
  store::Ask one;
  one.kind = store::Ask::kModel;
  one.rank = rank;
  one.padded = padded;
  return one;
}

TEST(ModelsOfOtherHosts, WorkerThatSendsSomethingElseIsDisconnected) {
  Models models({0, 1});
  Save(models.store(1), "m", kSmall, 1, 1);
  const auto ask = [](const auto& change) {
    store::Ask one = AskFor(1, 4096);
    change(one);
    return one;
  };
  const auto parcel = store::Parcel::Make(4096);
  std::vector<store::Ask> said;
  said.push_back(ask([](auto& one) { one.magic++; }));
  said.push_back(ask([](auto& one) { one.kind = 2; }));
  said.push_back(ask([](auto& one) { std::memset(one.name, 'x', sizeof one.name); }));
  for (const store::Ask& one : said) {
    const int socket = models.transport(0).Connect();
    ASSERT_EQ(store::SendWith(socket, &one, sizeof one, parcel->fd()), ssize_t(sizeof one));
    char byte;
    EXPECT_EQ(recv(socket, &byte, 1, 0), 0) << "the link listens on";
    close(socket);
  }
  Model got(kSmall);
  EXPECT_EQ(Request(*models.View(0, 1), "m", got), 1u);
}

// Else each message of a worker could leave its launcher one that stays open.
TEST(ModelsOfOtherHosts, OfTwoDescriptorsInAMessageOneIsLetIn) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  char data = 'x';
  iovec part{&data, 1};
  alignas(cmsghdr) char room[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  cmsghdr* const control = CMSG_FIRSTHDR(&message);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(2 * sizeof(int));
  std::memcpy(CMSG_DATA(control), ends, sizeof ends);
  ASSERT_EQ(sendmsg(ends[0], &message, 0), 1);
  int fd = -1;
  const int free = dup(ends[0]);  // the lowest number that a descriptor gets
  close(free);
  ASSERT_EQ(store::ReceiveWith(ends[1], &data, 1, fd), 1);
  EXPECT_EQ(fd, free);
  const int next = dup(ends[0]);
  EXPECT_EQ(next, free + 1) << "a second descriptor is open";
  for (const int each : {fd, next, ends[0], ends[1]}) close(each);
}

// A launcher without descriptors gets the message alone. What is no parcel may shrink under its feet.
TEST(ModelsOfOtherHosts, RequestWithAnUntakenParcelIsRefusedAndTheNextServed) {
  Models models({0, 1});
  Save(models.store(1), "m", kSmall, 1, 1);
  const int no_parcel = memfd_create("test", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(no_parcel, 1 << 20), 0);
  const auto parcel = store::Parcel::Make(4096);
  struct {
    uint64_t padded;
    int fd;
    uint32_t again;
  } const said[] = {{4096, -1, 1}, {4096, no_parcel, 0}, {8192, parcel->fd(), 0}, {UINT64_MAX, parcel->fd(), 0}};
  const int socket = models.transport(0).Connect();
  uint32_t number = 7;
  for (const auto& [padded, fd, again] : said) {
    store::Ask one = AskFor(1, padded);
    one.number = ++number;
    ASSERT_EQ(store::SendWith(socket, &one, sizeof one, fd), ssize_t(sizeof one));
    store::Refusal refusal;
    ASSERT_EQ(recv(socket, &refusal, sizeof refusal, 0), ssize_t(sizeof refusal));
    EXPECT_EQ(refusal.magic, store::Refusal::kMagic);
    EXPECT_EQ(refusal.number, number);
    EXPECT_EQ(refusal.again, again) << refusal.text;
  }
  store::Ask good = AskFor(1, 4096);
  CopyText(good.name, "unknown");
  ASSERT_EQ(store::SendWith(socket, &good, sizeof good, parcel->fd()), ssize_t(sizeof good));
  Await([&] { return parcel->done().Reached(1); });
  EXPECT_EQ(parcel->answer().status, KF_OK);
  close(no_parcel);
  close(socket);
}

// A launcher of the test's own: it refuses so many asks of a worker before it answers.
TEST(ModelsOfOtherHosts, WorkerAsksAgainAfterAMomentaryLackOfItsLauncher) {
  for (const uint32_t again : {1, 0}) {
    int pair[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    const auto others = std::make_shared<OtherHosts>(pair[1], hosts::Places({0, 1}), 0, kTimeout);
    close(pair[1]);
    int asked = 0;
    std::thread launcher([&, transport = pair[0]] {
      for (;;) {
        store::Ask ask;
        int fd = -1;
        if (store::ReceiveWith(transport, &ask, sizeof ask, fd) <= 0) return;
        if (++asked < 3) {
          store::Refusal refusal;
          refusal.number = ask.number;
          refusal.again = again;
          CopyText(refusal.text, "no descriptors");
          EXPECT_EQ(send(transport, &refusal, sizeof refusal, 0), ssize_t(sizeof refusal));
        } else {
          store::Answer answer;
          answer.version = 5;
          store::Parcel::Open(fd, ask.padded)->Finish(answer);
        }
        close(fd);
      }
    });
    uint64_t version = 0;
    const Error error = ErrorOf([&] { version = OtherHosts::ViewOf(others, 1)->Describe("m").version; });
    shutdown(pair[0], SHUT_RDWR);
    launcher.join();
    close(pair[0]);
    if (again == 1) {
      EXPECT_EQ(error.status(), KF_OK) << error.what();
      EXPECT_EQ(version, 5u);
      EXPECT_EQ(asked, 3);
    } else {
      EXPECT_EQ(error.status(), KF_INTERNAL);
      EXPECT_NE(std::string(error.what()).find("no descriptors"), std::string::npos) << error.what();
    }
  }
}

// A host that asks and asks, and takes nothing.
TEST(ModelsOfOtherHosts, NoMoreIsKeptForAHostThanTwoAnswers) {
  constexpr uint32_t kAsks = 5;
  const hosts::Places places({0, 1, 1, 1, 1, 1});
  Ends ends = Connect(2, 1);
  tcp::Mesh asker(0, 1, std::move(ends[0]), {kTimeout});
  ModelStore stores[kAsks + 1];
  std::atomic<uint32_t> found{0};
  ModelTransport transport(places, 1, std::move(ends[1]), [&](uint32_t rank) {
    found++;
    return std::make_shared<StoreView>(stores[rank].fd(), /*own=*/true);
  });
  store::Ask asks[kAsks];
  store::Answer answers[kAsks];
  std::vector<tcp::Mesh::Ticket> said, heard;
  Model model(kLarge);
  const auto blobs = model.Blobs();
  for (uint32_t i = 0; i < kAsks; i++) {
    Save(stores[i + 1], "m", kLarge, i + 1, 1);
    asks[i].kind = store::Ask::kModel;
    asks[i].rank = i + 1;
    asks[i].bytes = store::TotalBytes(blobs.data(), blobs.size());
    asks[i].padded = store::PaddedBytes(blobs.data(), blobs.size());
    CopyText(asks[i].name, "m");
    CopyText(asks[i].layout, "two");
    const tcp::Tag tag = tcp::Tag::Of("kungfu/models", i);
    heard.push_back(asker.Receive(1, 1, tag.Step(1), &answers[i], sizeof answers[i]));
    said.push_back(asker.Send(1, 1, tag, &asks[i], sizeof asks[i]));
  }
  std::vector<char> tensors(asks[0].padded);
  for (uint32_t i = 0; i < kAsks; i++) {
    asker.Wait(heard[i]);
    EXPECT_EQ(answers[i].version, 1u);
    if (i < 2) std::this_thread::sleep_for(std::chrono::milliseconds(50));  // in which a third could be heard
    EXPECT_LE(found, std::max(2u, i + 1));
    if (i > 0) {  // one is left, so that there are never less than two
      asker.Wait(asker.Receive(1, 1, tcp::Tag::Of("kungfu/models", i - 1).Step(2), tensors.data(), tensors.size()));
      EXPECT_EQ(std::memcmp(tensors.data(), Model(kLarge, i, 1).a.data(), kLarge * 8), 0);
    }
  }
  EXPECT_EQ(found, kAsks);
}

}  // namespace
}  // namespace kungfu::testing::models
