// What becomes of the others when a host ends somewhere in the middle, or sends what no host sends.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>

#include "deaths.h"
#include "hosts.h"
#include "transport/tcp/mesh.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using tcp::FrameHeader;
using tcp::FrameKind;
using tcp::Mesh;
using tcp::Tag;
using Ticket = Mesh::Ticket;

void ExpectLost(const Error& error, uint32_t host) {
  EXPECT_EQ(error.status(), KF_PEER_LOST) << error.what();
  EXPECT_NE(std::string(error.what()).find(HostName(host)), std::string::npos) << error.what();
}

// All hosts send to all others at once. Returns what became of the messages from and to each; all have ended.
struct Exchange {
  Exchange(Mesh& mesh, uint64_t round, uint32_t messages) : sent(mesh.size()), received(mesh.size()) {
    static constexpr size_t kSizes[] = {100, 30000, 300000, 1};
    for (uint32_t m = 0; m < messages; m++) {
      const size_t bytes = kSizes[m % 4];
      for (uint32_t other = 0; other < mesh.size(); other++) {
        if (other == mesh.self()) continue;
        data.push_back(Pattern(bytes, mesh.self() * 100 + m));
        sent[other].push_back(mesh.Send(kEpoch, other, Tag::Of("x", round * 1000 + m), data.back().data(), bytes));
        here.emplace_back(bytes);
        received[other].push_back(
            mesh.Receive(kEpoch, other, Tag::Of("x", round * 1000 + m), here.back().data(), bytes));
      }
    }
  }
  // Waits for all messages from and to `other`; returns the first error.
  Error With(const Mesh& mesh, uint32_t other) const {
    Error first(KF_OK, "");
    for (const auto* tickets : {&sent[other], &received[other]}) {
      for (const Ticket& ticket : *tickets) {
        const Error error = Outcome(mesh, ticket);
        if (first.status() == KF_OK) first = error;
      }
    }
    return first;
  }

  std::vector<std::vector<char>> data, here;  // before the tickets, which end before it
  std::vector<std::vector<Ticket>> sent, received;
};

// Two hosts tell each other after a round whether they have lost a third one: whether either has.
bool Either(Mesh& mesh, uint32_t other, uint64_t round, bool lost) {
  bool its = false;
  const Ticket sent = mesh.Send(kEpoch, other, Tag::Of("lost", round), &lost, 1);
  mesh.Wait(mesh.Receive(kEpoch, other, Tag::Of("lost", round), &its, 1));
  mesh.Wait(sent);
  return lost || its;
}

// Passes on what comes at either of two sockets, until `budget` is spent: then it closes both, as a host that ends
// does.
class Relay {
 public:
  Relay(std::vector<std::array<int, 2>> pairs, uint64_t budget) : pairs_(std::move(pairs)), budget_(budget) {
    thread_ = std::thread([this] { Serve(); });
  }
  ~Relay() {
    stop_ = true;
    thread_.join();
  }

 private:
  void Serve() {
    while (!stop_ && budget_ > 0) {
      std::vector<pollfd> waits;
      for (const auto& pair : pairs_) {
        waits.push_back({pair[0], POLLIN, 0});
        waits.push_back({pair[1], POLLIN, 0});
      }
      poll(waits.data(), waits.size(), 5);
      for (size_t w = 0; w < waits.size() && budget_ > 0; w++) {
        if (waits[w].revents == 0) continue;
        char buffer[16384];
        const ssize_t n = recv(waits[w].fd, buffer, std::min<uint64_t>(sizeof buffer, budget_), MSG_DONTWAIT);
        if (n <= 0) {
          budget_ = 0;
          break;
        }
        budget_ -= static_cast<uint64_t>(n);
        for (ssize_t at = 0; at < n;) {
          const ssize_t sent = send(waits[w ^ 1].fd, buffer + at, static_cast<size_t>(n - at), MSG_NOSIGNAL);
          if (sent < 0) break;
          at += sent;
        }
      }
    }
    for (const auto& pair : pairs_) {
      close(pair[0]);
      close(pair[1]);
    }
  }

  const std::vector<std::array<int, 2>> pairs_;
  uint64_t budget_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Host 2's connections to both others end after a random number of bytes, all at once.
TEST(MeshLoss, AHostThatEndsAtAnyByteIsNamedAndTheOthersGoOn) {
  constexpr uint32_t kVictim = 2;
  for (uint32_t round = 0; round < 300 / kSlower; round++) {
    std::mt19937_64 random(Seed() + round);
    Ends ends(3, std::vector<tcp::HostEnds>(3));
    std::vector<std::array<int, 2>> relayed;
    for (uint32_t a = 0; a < 3; a++) {
      for (uint32_t b = 0; b < 3; b++) ends[a][b].name = HostName(b);
      for (uint32_t b = 0; b < a; b++) {
        for (uint32_t c = 0; c < 2; c++) {
          const auto pair = ConnectedPair();
          ends[b][a].connections.push_back(pair[0]);
          if (a != kVictim) {
            ends[a][b].connections.push_back(pair[1]);
            continue;
          }
          const auto beyond = ConnectedPair();
          ends[a][b].connections.push_back(beyond[1]);
          relayed.push_back({pair[1], beyond[0]});
        }
      }
    }
    Hosts hosts(std::move(ends));
    // A third of them within the first frames.
    const uint64_t most = round % 3 == 0 ? 2000 : 3000000;
    Relay relay(std::move(relayed), 1 + random() % most);
    const auto began = Clock::now();
    hosts.Run([&](uint32_t self, Mesh& mesh) {
      for (uint64_t i = 0;; i++) {
        const Exchange exchange(mesh, i, 8);
        bool lost = false;
        for (uint32_t other = 0; other < 3; other++) {
          if (other == self) continue;
          const Error error = exchange.With(mesh, other);
          if (self == kVictim || other == kVictim) {
            lost = lost || error.status() != KF_OK;
            if (error.status() != KF_OK) ExpectLost(error, other);
          } else {
            EXPECT_EQ(error.status(), KF_OK) << error.what();
          }
        }
        if (self == kVictim ? lost : Either(mesh, 1 - self, i, lost)) break;
      }
      if (self == kVictim) return;
      char byte = 0;  // and later ones
      ExpectLost(Outcome(mesh, mesh.Receive(kEpoch, kVictim, Tag::Of("y", 0), &byte, 1)), kVictim);
      ExpectLost(Outcome(mesh, mesh.Send(kEpoch, kVictim, Tag::Of("y", 0), &byte, 1)), kVictim);
    });
    ASSERT_LT(Clock::now() - began, 40s);
  }
}

// Processes, of which one is killed at a random moment.
TEST(MeshLoss, AKilledHostIsNamedSoon) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "it sees nothing of what passes between processes; the test above has threads";
#endif
  for (uint32_t round = 0; round < 100 / kSlower; round++) {
    std::mt19937 random(Seed() + round);
    Ends ends = Connect(3, 2);
    int done[2];
    ASSERT_EQ(pipe2(done, O_CLOEXEC), 0);
    pid_t pids[3];
    for (uint32_t self = 0; self < 3; self++) {
      pids[self] = fork();
      if (pids[self] != 0) continue;
      for (uint32_t other = 0; other < 3; other++) {
        for (uint32_t h = 0; h < 3; h++) {
          for (const int fd : ends[other][h].connections) {
            if (other != self) close(fd);
          }
        }
      }
      int status = 1;
      // With its mesh: who closes a connection while the other still reads may take back what it has sent, since the
      // kernel drops that where anything that came is unread. Hosts end when all have come to the end.
      const auto end = [&](int with) {
        const auto told = static_cast<char>(with);
        static_cast<void>(write(done[1], &told, 1));
        pause();
      };
      try {
        Mesh mesh(self, kEpoch, std::move(ends[self]), {20s});
        for (uint64_t i = 0;; i++) {
          const Exchange exchange(mesh, i, 8);
          const Error error = exchange.With(mesh, self == 2 ? 0 : 2);
          const bool lost = error.status() == KF_PEER_LOST;
          if (!lost && error.status() != KF_OK) throw error;
          if (self == 2) {
            static_cast<void>(exchange.With(mesh, 1));
            continue;
          }
          if (const Error other = exchange.With(mesh, 1 - self); other.status() != KF_OK) throw other;
          if (!Either(mesh, 1 - self, i, lost)) continue;
          char byte = 0;
          const Error later = Outcome(mesh, mesh.Receive(kEpoch, 2, Tag::Of("y", 0), &byte, 1));
          status = later.status() == KF_PEER_LOST ? 0 : 2;
          break;
        }
        end(status);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "host %u: %s\n", self, error.what());
        status = 4;
      }
      end(status);
    }
    for (const auto& of_host : ends) {
      for (const auto& other : of_host) {
        for (const int fd : other.connections) close(fd);
      }
    }
    usleep(random() % 20000);
    ASSERT_EQ(kill(pids[2], SIGKILL), 0);
    const auto killed = Clock::now();
    close(done[1]);
    for (int survivor = 0; survivor < 2; survivor++) {
      char status = -1;
      ASSERT_EQ(read(done[0], &status, 1), 1);
      EXPECT_EQ(int{status}, 0) << "round " << round;
    }
    ASSERT_LT(Clock::now() - killed, 15s);
    close(done[0]);
    for (const pid_t pid : pids) {
      kill(pid, SIGKILL);
      ASSERT_EQ(waitpid(pid, nullptr, 0), pid);
    }
  }
}

// ---- frames that no host sends

// A host whose connections are in the hands of a test.
struct Raw {
  int fd = -1;
  // As far as it is taken: not where it was refused before, nor while frames of a later epoch are held back.
  void Write(const void* data, size_t bytes, int patience_ms = 10000) const {
    for (size_t at = 0; at < bytes;) {
      pollfd free{fd, POLLOUT, 0};
      if (poll(&free, 1, patience_ms) != 1) return;
      const ssize_t n = send(fd, static_cast<const char*>(data) + at, bytes - at, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n <= 0) return;
      at += static_cast<size_t>(n);
    }
  }
  void Write(const FrameHeader& header) const { Write(&header, sizeof header); }
};

// Host 0, with host 1 an honest one, and raw ones from 2 on.
class Stranger : public ::testing::Test {
 protected:
  void Make(uint32_t raws) {
    Ends ends = Connect(2, 1);
    for (uint32_t r = 0; r < raws; r++) {
      const auto pair = ConnectedPair();
      raws_.push_back({pair[1]});
      ends[0].push_back({HostName(2 + r), {pair[0]}});
    }
    honest_ = std::make_unique<Mesh>(1, kEpoch, std::move(ends[1]), tcp::MeshOptions{20s});
    mesh_ = std::make_unique<Mesh>(0, kEpoch, std::move(ends[0]), tcp::MeshOptions{20s});
  }
  void TearDown() override {
    for (const Raw& raw : raws_) {
      if (raw.fd >= 0) close(raw.fd);
    }
  }
  // What host 0 says of a raw one.
  Error Verdict(uint32_t raw) {
    char byte;
    return Outcome(*mesh_, mesh_->Receive(kEpoch, 2 + raw, Tag::Of("verdict", 0), &byte, 1));
  }
  void ExpectRefused(uint32_t raw, const std::string& why) {
    const Error error = Verdict(raw);
    ExpectLost(error, 2 + raw);
    EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    ExpectHonest();
  }
  void ExpectHonest() {
    const std::vector<char> data = Pattern(100000, ++count_);
    std::vector<char> got(data.size());
    const Ticket sent = honest_->Send(kEpoch, 0, Tag::Of("honest", count_), data.data(), data.size());
    mesh_->Wait(mesh_->Receive(kEpoch, 1, Tag::Of("honest", count_), got.data(), got.size()));
    honest_->Wait(sent);
    EXPECT_EQ(got, data);
  }
  static FrameHeader Data(const Tag& tag, uint64_t offset, uint32_t length, uint64_t total) {
    FrameHeader header;
    header.kind = FrameKind::kData;
    header.epoch = kEpoch;
    header.tag = tag;
    header.offset = offset;
    header.length = length;
    header.total = total;
    return header;
  }
  static FrameHeader Bare(FrameKind kind, const Tag& tag, uint64_t total) {
    FrameHeader header = Data(tag, 0, 0, total);
    header.kind = kind;
    return header;
  }

  std::unique_ptr<Mesh> mesh_, honest_;
  std::vector<Raw> raws_;
  uint32_t count_ = 0;
};

TEST_F(Stranger, IsLostForAFrameThatIsNone) {
  const std::vector<char> payload = Pattern(tcp::kFrameBytes + 1, 1);
  const Tag tag = Tag::Of("x", 0);
  std::vector<char> to(1 << 20, 'c');
  struct Case {
    std::vector<FrameHeader> headers;  // each followed by its payload
    size_t posted;                     // bytes that host 0 receives
    const char* why;
  };
  FrameHeader magic = Data(tag, 0, 8, 8), kind = magic, reserved = magic, taken = magic;
  magic.magic++;
  kind.kind = static_cast<FrameKind>(5);
  reserved.reserved = 1;
  taken.taken = 1;
  const std::vector<Case> cases = {
      {{magic}, 8, "magic"},
      {{kind}, 8, "kind"},
      {{reserved}, 8, "kind"},
      {{taken}, 8, "taken"},
      {{Data(tag, 0, 9, 8)}, 8, "9 bytes at 0 of 8"},
      {{Data(tag, ~0ull - 3, 8, 8)}, 8, "of 8"},
      {{Data(tag, 0, tcp::kFrameBytes + 1, 1 << 20)}, 1 << 20, "262145"},
      {{Data(tag, 0, 0, 8)}, 8, "0 bytes at 0 of 8"},
      {{Data(tag, 0, 8, 8)}, 9, "8 bytes where 9 are expected"},
      {{Data(tag, 0, 40000, 80000)}, 80001, "80000 bytes where 80001 are expected"},
      {{Data(tag, 0, 4, 8)}, 8, "nobody has asked"},
      {{Data(tag, 0, 40000, 40000)}, 0, "nobody has asked"},
      {{Data(tag, 0, 60000, 80000), Data(tag, 0, 60000, 80000)}, 80000, "twice"},
      {{Data(tag, 0, 8, 8), Data(tag, 0, 8, 8)}, 0, "twice"},
      {{Bare(FrameKind::kReady, tag, 8), Bare(FrameKind::kReady, tag, 8)}, 0, "twice"},
      {{Bare(FrameKind::kOffer, tag, 8), Bare(FrameKind::kOffer, tag, 8)}, 0, "twice"},
      {{Bare(FrameKind::kOffer, tag, 40000)}, 0, "offered 40000"},
      {{Bare(FrameKind::kOffer, tag, 8)}, 9, "8 bytes where 9"},
  };
  Make(static_cast<uint32_t>(cases.size()));
  for (uint32_t c = 0; c < cases.size(); c++) {
    Ticket posted;
    if (cases[c].posted > 0) posted = mesh_->Receive(kEpoch, 2 + c, tag, to.data(), cases[c].posted);
    for (const FrameHeader& header : cases[c].headers) {
      raws_[c].Write(header);
      raws_[c].Write(payload.data(), std::min(payload.size(), size_t{header.length}));
    }
    ExpectRefused(c, cases[c].why);
    if (cases[c].posted > 0) ExpectLost(Outcome(*mesh_, posted), 2 + c);
  }
}

// As much as it likes, but no more than is bounded.
TEST_F(Stranger, CannotHaveAnotherHostKeepMuch) {
  Make(3);
  const std::vector<char> payload = Pattern(tcp::kUnaskedBytes, 1);
  for (uint64_t i = 0; i < 2 * tcp::kUnaskedCredit / payload.size(); i++) {
    raws_[0].Write(Data(Tag::Of("x", i), 0, tcp::kUnaskedBytes, tcp::kUnaskedBytes));
    raws_[0].Write(payload.data(), payload.size());
  }
  ExpectRefused(0, "more than this host can keep");
  std::vector<FrameHeader> many;
  for (uint64_t i = 0; i < tcp::kMostEarly + 2; i++) many.push_back(Bare(FrameKind::kReady, Tag::Of("x", i), 8));
  raws_[1].Write(many.data(), many.size() * sizeof(FrameHeader));
  ExpectRefused(1, "asked for 65537 messages");
  for (FrameHeader& header : many) header.kind = FrameKind::kOffer;
  raws_[2].Write(many.data(), many.size() * sizeof(FrameHeader));
  ExpectRefused(2, "offered 65537 messages");
}

TEST_F(Stranger, OfAnOlderEpochIsDroppedAndOfANewerOneWaits) {
  Make(1);
  const Tag tag = Tag::Of("x", 0);
  char got[8] = "-------";
  Ticket posted = mesh_->Receive(kEpoch, 2, tag, got, 8);
  FrameHeader older = Data(tag, 0, 8, 8);
  older.epoch--;
  raws_[0].Write(older);
  raws_[0].Write("old old", 8);
  for (uint64_t i = 0; i < 100000; i++) {  // of which nothing is kept
    if (i % 1000 == 0) older = Data(Tag::Of("z", i), 0, 8, 1 << 30);
    older.epoch = kEpoch - 1;
    raws_[0].Write(older);
    raws_[0].Write("old old", 8);
  }
  raws_[0].Write(Data(tag, 0, 8, 8));
  raws_[0].Write("present", 8);
  EXPECT_EQ(Outcome(*mesh_, posted).status(), KF_OK);
  EXPECT_STREQ(got, "present");
  FrameHeader newer = Data(tag, 0, 8, 8);
  newer.epoch = kEpoch + 2;
  raws_[0].Write(newer);
  raws_[0].Write("is next", 8);
  ExpectHonest();
  mesh_->Cancel(kEpoch + 1);
  mesh_->Cancel(kEpoch + 2);
  EXPECT_EQ(Outcome(*mesh_, mesh_->Receive(kEpoch + 2, 2, tag, got, 8)).status(), KF_OK);
  EXPECT_STREQ(got, "is next");
  // One that waits, and whose sender is gone, is lost all the same.
  newer.epoch = kEpoch + 9;
  raws_[0].Write(newer);
  shutdown(raws_[0].fd, SHUT_RDWR);
  ExpectLost(Outcome(*mesh_, mesh_->Receive(kEpoch + 2, 2, Tag::Of("y", 0), got, 8)), 2);
}

// Random, truncated, oversized and old frames, whole streams of them; beside each an honest host.
TEST_F(Stranger, FramesAtRandomHarmNobody) {
  constexpr uint32_t kStreams = 50, kFrames = 10;
  constexpr uint32_t kMeshes = 20000 / kStreams / kFrames / kSlower;
  const std::vector<char> payload = Pattern(tcp::kFrameBytes, 1);
  for (uint32_t m = 0; m < kMeshes; m++) {
    std::mt19937_64 random(Seed() + m);
    raws_.clear();
    Make(kStreams);
    std::vector<std::vector<char>> memory;
    std::vector<Ticket> posted;
    for (uint32_t s = 0; s < kStreams; s++) {
      for (uint64_t t = 0; t < 3; t++) {
        memory.emplace_back(t == 0 ? 8 : t == 1 ? 30000 : 100000);
        posted.push_back(mesh_->Receive(kEpoch, 2 + s, Tag::Of("x", t), memory.back().data(), memory.back().size()));
      }
      for (uint32_t f = 0; f < kFrames; f++) {
        FrameHeader header;
        header.kind = static_cast<FrameKind>(1 + random() % 4);
        header.epoch = kEpoch - (random() % 3 == 0 ? 1 : 0);
        header.tag = Tag::Of("x", random() % 6);
        const size_t totals[] = {0, 8, 30000, 100000, random() % 200000, random()};
        header.total = totals[random() % 6];
        if (header.kind == FrameKind::kData) {
          header.length = static_cast<uint32_t>(std::min<uint64_t>(header.total, random() % tcp::kFrameBytes));
          if (random() % 2 == 0) header.length = static_cast<uint32_t>(std::min<uint64_t>(header.total, 30000));
          header.offset = random() % 2 == 0 ? 0 : random() % (header.total - header.length + 1);
        }
        char raw[sizeof header];
        std::memcpy(raw, &header, sizeof raw);
        if (random() % 3 == 0) raw[random() % sizeof raw] ^= static_cast<char>(1 << random() % 8);
        if (random() % 20 == 0) {
          for (char& byte : raw) byte = static_cast<char>(random());
        }
        raws_[s].Write(raw, random() % 20 == 0 ? random() % sizeof raw : sizeof raw, 20);
        const size_t length = std::min<size_t>(header.length, payload.size());
        raws_[s].Write(payload.data(), random() % 20 == 0 ? random() % (length + 1) : length, 20);
      }
      shutdown(raws_[s].fd, SHUT_WR);
      if (s % 10 == 0) ExpectHonest();
    }
    ExpectHonest();
    for (uint32_t s = 0; s < kStreams; s++) {
      // Also of one whose last bytes never come, since those before it are held back.
      const linger at_once{1, 0};
      setsockopt(raws_[s].fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      close(std::exchange(raws_[s].fd, -1));
      const Error verdict = Verdict(s);
      ASSERT_EQ(verdict.status(), KF_PEER_LOST) << verdict.what();
      for (uint32_t t = 0; t < 3; t++) {
        const kf_status status = Outcome(*mesh_, posted[s * 3 + t]).status();
        ASSERT_TRUE(status == KF_OK || status == KF_PEER_LOST) << status;
      }
    }
    ExpectHonest();
    posted.clear();
    mesh_ = nullptr;
    honest_ = nullptr;
  }
  raws_.clear();
}

}  // namespace
}  // namespace kungfu::testing
