// What becomes of the others when a host ends somewhere in the middle.
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

#include "hosts.h"
#include "killed_ranks.h"
#include "transport/tcp/mesh.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using tcp::Mesh;
using tcp::Tag;
using Ticket = Mesh::Ticket;

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
  Error With(Mesh& mesh, uint32_t other) const {
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
      // With its mesh: an end that closes while the other still reads may take back what it has sent, since the
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

}  // namespace
}  // namespace kungfu::testing
