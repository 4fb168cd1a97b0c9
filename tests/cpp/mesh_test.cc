// Messages between hosts: what arrives, which host waits for which, and what becomes of them when a host is lost or an
// epoch ends.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>

#include "base/interrupt.h"
#include "hosts.h"
#include "killed_ranks.h"
#include "transport/tcp/mesh.h"

namespace kungfu::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using tcp::FrameHeader;
using tcp::Mesh;
using tcp::Tag;
using Ticket = Mesh::Ticket;

constexpr char kCanary = 0x5a;

// ---- what arrives

TEST(Mesh, DeliversEverySizeWhicheverSideComesFirst) {
  const std::vector<size_t> sizes = {
      0, 1, 4095, 4096, 4097, tcp::kUnaskedBytes, tcp::kUnaskedBytes + 1, 256 << 10, 262145, 524287, 700001, 5 << 20};
  for (const uint32_t connections : {1u, 3u}) {
    Hosts hosts(2, connections);
    for (size_t s = 0; s < sizes.size(); s++) {
      for (const bool sender_first : {true, false}) {
        const Tag tag = Tag::Of("x", 2 * s + sender_first);
        const std::vector<char> data = Pattern(sizes[s], static_cast<uint32_t>(s));
        std::vector<char> got(sizes[s] + 1, kCanary);
        Ticket sent, received;
        const auto send = [&] { sent = hosts.at(0).Send(kEpoch, 1, tag, data.data(), data.size()); };
        const auto receive = [&] { received = hosts.at(1).Receive(kEpoch, 0, tag, got.data(), data.size()); };
        sender_first ? send() : receive();
        std::this_thread::yield();
        sender_first ? receive() : send();
        hosts.at(1).Wait(received);
        hosts.at(0).Wait(sent);
        ASSERT_TRUE(std::equal(data.begin(), data.end(), got.begin())) << sizes[s] << " bytes";
        ASSERT_EQ(got.back(), kCanary);
      }
    }
    const auto sent = hosts.at(0).Counted(1), received = hosts.at(1).Counted(0);
    const size_t total = 2 * std::accumulate(sizes.begin(), sizes.end(), size_t{0});
    EXPECT_GE(sent.sent, total);
    EXPECT_LE(sent.sent, total + 200 * sizeof(FrameHeader));
    EXPECT_EQ(sent.sent, received.received);
    EXPECT_TRUE(Soon([&] { return hosts.at(0).Counted(1).received == hosts.at(1).Counted(0).sent; }));
  }
}

// ---- which thread serves the connections

// With such intervals, a lost wake-up of a waiting thread or of the I/O thread costs 30 s.
constexpr tcp::MeshOptions kOnlyWakeUps{60s, 30s, 30s, 30s};

// Fails if `body` takes as long as a slice of kOnlyWakeUps.
void ExpectNoLostWakeUp(const std::function<void()>& body) {
  const auto began = Clock::now();
  body();
  EXPECT_LT(Clock::now() - began, 25s) << "a thread was not woken";
}

// Of each host four threads with messages to all others, which are posted and awaited in an order of its own.
TEST(Mesh, MessagesOfManyThreadsMeetInAnyOrder) {
  constexpr uint32_t kHosts = 3, kThreads = 4, kMessages = 40;
  Hosts hosts(kHosts, 3, kOnlyWakeUps);
  const auto size_of = [](uint32_t what) { return size_t{what} * 7919u % (what % 5 == 0 ? 900000u : 40000u); };
  ExpectNoLostWakeUp([&] {
    hosts.Run([&](uint32_t self, Mesh& mesh) {
      std::vector<std::thread> threads;
      for (uint32_t t = 0; t < kThreads; t++) {
        threads.emplace_back([&, t] {
          struct Message {
            uint32_t other, what;
            bool sends;
            std::vector<char> data;
            Ticket ticket;
          };
          std::vector<Message> messages;
          for (uint32_t other = 0; other < kHosts; other++) {
            for (uint32_t m = 0; other != self && m < kMessages; m++) {
              const auto what = [&](uint32_t from, uint32_t to) {
                return ((from * kHosts + to) * kThreads + t) * 100 + m;
              };
              messages.push_back(
                  {other, what(self, other), true, Pattern(size_of(what(self, other)), what(self, other)), {}});
              messages.push_back({other, what(other, self), false, std::vector<char>(size_of(what(other, self))), {}});
            }
          }
          std::mt19937 random(Seed() + self * 100 + t);
          std::shuffle(messages.begin(), messages.end(), random);
          for (Message& m : messages) {
            const Tag tag = Tag::Of("many", m.what);
            m.ticket = m.sends ? mesh.Send(kEpoch, m.other, tag, m.data.data(), m.data.size())
                               : mesh.Receive(kEpoch, m.other, tag, m.data.data(), m.data.size());
          }
          std::shuffle(messages.begin(), messages.end(), random);
          for (Message& m : messages) mesh.Wait(m.ticket);
          for (const Message& m : messages) EXPECT_EQ(m.data == Pattern(size_of(m.what), m.what), true);
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
  });
}

// A thread that waits for a small message reads the connections, also for other threads.
TEST(Mesh, WaitingThreadServesTheMessagesOfOthers) {
  Hosts hosts(3, 2, kOnlyWakeUps);
  char late = 0;
  ExpectNoLostWakeUp([&] {
    std::thread driver([&] { hosts.at(0).Wait(hosts.at(0).Receive(kEpoch, 1, Tag::Of("late", 0), &late, 1)); });
    for (const size_t bytes : {size_t{1}, tcp::kUnaskedBytes, size_t{3 << 20}}) {
      const std::vector<char> data = Pattern(bytes, 3);
      for (uint64_t i = 0; i < 50; i++) {
        std::vector<char> back(bytes), there(bytes);
        const Tag tag = Tag::Of("other", bytes * 100 + i);
        const Ticket ticket = hosts.at(0).Receive(kEpoch, 2, tag, back.data(), bytes);
        const Ticket sent = hosts.at(0).Send(kEpoch, 2, tag, data.data(), bytes);
        hosts.at(2).Wait(hosts.at(2).Receive(kEpoch, 0, tag, there.data(), bytes));
        hosts.at(2).Wait(hosts.at(2).Send(kEpoch, 0, tag, there.data(), bytes));
        hosts.at(0).Wait(ticket);
        hosts.at(0).Wait(sent);
        EXPECT_EQ(back, data);
      }
    }
    hosts.at(1).Wait(hosts.at(1).Send(kEpoch, 0, Tag::Of("late", 0), "l", 1));
    driver.join();
  });
  EXPECT_EQ(late, 'l');
}

// Returns how often the meshes' I/O threads have slept.
uint64_t SleepsOfIoThreads() {
  uint64_t found = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name, line;
    std::getline(std::ifstream(task.path() / "comm"), name);
    std::ifstream status(task.path() / "status");
    while (name == "kungfu-mesh" && std::getline(status, line)) {
      if (line.rfind("voluntary_ctxt_switches:", 0) == 0) found += std::stoull(line.substr(line.find('\t')));
    }
  }
  return found;
}

// If each small message woke an I/O thread, it would take longer.
TEST(Mesh, SmallMessagesDoNotWakeTheIoThreads) {
  constexpr uint64_t kRounds = 1000;
  Hosts hosts(2, 2, kOnlyWakeUps);
  const uint64_t before = SleepsOfIoThreads();
  ExpectNoLostWakeUp([&] {
    hosts.Run([&](uint32_t self, Mesh& mesh) {
      for (uint64_t i = 0; i < kRounds; i++) {
        char got = 0;
        const Ticket ticket = mesh.Receive(kEpoch, 1 - self, Tag::Of("word", i), &got, 1);
        mesh.Wait(mesh.Send(kEpoch, 1 - self, Tag::Of("word", i), "w", 1));
        mesh.Wait(ticket);
      }
    });
  });
  EXPECT_LT(SleepsOfIoThreads() - before, kRounds / 4);
}

// A thread that has waited for long ends its wait. The connections don't stay unread until the I/O thread's next check.
TEST(Mesh, AnEndedWaitLeavesTheConnectionsToTheIoThread) {
  Hosts hosts(2, 1, {60s, 30s, 1ms, 30s});
  const std::vector<char> large = Pattern(3 << 20, 5);
  std::vector<char> got(large.size());
  ExpectNoLostWakeUp([&] {
    for (uint64_t round = 0; round < 20; round++) {
      char word = 0;
      const Ticket received = hosts.at(0).Receive(kEpoch, 1, Tag::Of("word", round), &word, 1);
      std::thread late([&] {
        std::this_thread::sleep_for(20ms);  // so that the I/O thread checks twice
        hosts.at(1).Wait(hosts.at(1).Send(kEpoch, 0, Tag::Of("word", round), "w", 1));
      });
      hosts.at(0).Wait(received);
      late.join();
      const Ticket sent = hosts.at(0).Send(kEpoch, 1, Tag::Of("large", round), large.data(), large.size());
      hosts.at(1).Wait(hosts.at(1).Receive(kEpoch, 0, Tag::Of("large", round), got.data(), got.size()));
      ASSERT_TRUE(Soon([&] { return sent.IsDone(); }));  // host 0 must read that host 1 asks for the message
      ASSERT_EQ(got, large);
    }
  });
}

// After a wait, the connections stay lent for a moment. Messages that no thread awaits still arrive and go out.
TEST(Mesh, MessagesMoveWithoutAWaitAfterAWait) {
  Hosts hosts(2, 1);
  const std::vector<char> large = Pattern(3 << 20, 4);
  for (uint64_t round = 0; round < 20; round++) {
    char word = 0;
    const Ticket received = hosts.at(0).Receive(kEpoch, 1, Tag::Of("word", round), &word, 1);
    std::thread late([&] {
      std::this_thread::sleep_for(1ms);  // so that host 0 has to wait, and lends its connections
      hosts.at(1).Wait(hosts.at(1).Send(kEpoch, 0, Tag::Of("word", round), "w", 1));
    });
    hosts.at(0).Wait(received);
    late.join();
    std::vector<char> here(large.size()), there(large.size());
    const Ticket tickets[] = {hosts.at(0).Receive(kEpoch, 1, Tag::Of("in", round), here.data(), here.size()),
                              hosts.at(1).Send(kEpoch, 0, Tag::Of("in", round), large.data(), large.size()),
                              hosts.at(0).Send(kEpoch, 1, Tag::Of("out", round), large.data(), large.size()),
                              hosts.at(1).Receive(kEpoch, 0, Tag::Of("out", round), there.data(), there.size())};
    for (const Ticket& ticket : tickets) ASSERT_TRUE(Soon([&] { return ticket.IsDone(); }));
    ASSERT_EQ(here, large);
    ASSERT_EQ(there, large);
  }
}

// A new epoch and the loss of a host end the waits of the driver and of the threads that sleep.
TEST(Mesh, WaitsOfAllThreadsEndWithTheEpochAndTheHost) {
  for (const bool loses : {false, true}) {
    for (const uint32_t waiting : {1U, 4U}) {
      Hosts hosts(3, 2, kOnlyWakeUps);
      char got[4];
      ExpectNoLostWakeUp([&] {
        std::vector<std::thread> threads;
        for (uint32_t i = 0; i < waiting; i++) {
          threads.emplace_back([&, i] {
            const Ticket ticket = hosts.at(0).Receive(kEpoch, 1, Tag::Of("never", i), &got[i], 1);
            EXPECT_EQ(Outcome(hosts.at(0), ticket).status(), loses ? KF_PEER_LOST : KF_STALE);
          });
        }
        std::this_thread::sleep_for(20ms);
        if (loses) {
          hosts.at(0).LoseHost(1, "by the test");
        } else {
          hosts.at(0).Cancel(kEpoch + 1);
        }
        for (std::thread& thread : threads) thread.join();
      });
    }
  }
}

// The message has arrived before the receiver's epoch begins. The I/O thread ends it while the driver sleeps.
TEST(Mesh, AWaitEndsWhenAnEarlyMessageOfItsEpochIsHandled) {
  Hosts hosts(2, 1, kOnlyWakeUps);
  ExpectNoLostWakeUp([&] {
    for (uint64_t epoch = kEpoch + 1; epoch < kEpoch + 100; epoch++) {
      char got = 0;
      hosts.at(1).Cancel(epoch);
      const Ticket sent = hosts.at(1).Send(epoch, 0, Tag::Of("early", 0), "e", 1);
      if (epoch % 2 == 0) std::this_thread::sleep_for(1ms);
      hosts.at(0).Cancel(epoch);
      hosts.at(0).Wait(hosts.at(0).Receive(epoch, 1, Tag::Of("early", 0), &got, 1));
      hosts.at(1).Wait(sent);
      ASSERT_EQ(got, 'e');
    }
  });
}

// The driver handles events all the time, and still sees that its time is over.
TEST(Mesh, AWaitTimesOutWhileOtherMessagesArrive) {
  Hosts hosts(2, 1, {200ms});
  std::atomic<bool> over{false};
  std::thread traffic([&] {
    for (uint64_t i = 0; i < 8000 && !over; i++) {
      hosts.at(1).Send(kEpoch, 0, Tag::Of("traffic", i), "t", 1);
      std::this_thread::sleep_for(1ms);
    }
  });
  char never = 0;
  const Ticket ticket = hosts.at(0).Receive(kEpoch, 1, Tag::Of("never", 0), &never, 1);
  EXPECT_EQ(Outcome(hosts.at(0), ticket).status(), KF_TIMEOUT);
  over = true;
  EXPECT_LT(hosts.at(0).Counted(1).received, 4000 * (sizeof(FrameHeader) + 1)) << "the wait ended with the traffic";
  traffic.join();
}

// A forked child would read data that is meant for its parent.
TEST(Mesh, AForkedChildDoesNotWait) {
  Hosts hosts(2, 1);
  char got = 0;
  const Ticket ticket = hosts.at(0).Receive(kEpoch, 1, Tag::Of("x", 0), &got, 1);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(Outcome(hosts.at(0), ticket).status() == KF_INVALID ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  hosts.at(1).Wait(hosts.at(1).Send(kEpoch, 0, Tag::Of("x", 0), "x", 1));
  hosts.at(0).Wait(ticket);
  EXPECT_EQ(got, 'x');
}

// ---- which host waits for which

TEST(Mesh, LateReceiverDelaysNoOther) {
  Hosts hosts(2, 1);
  const std::vector<char> large = Pattern(3 << 20, 1), small = Pattern(1000, 2);
  std::vector<char> large_got(large.size()), small_got(small.size());
  const Ticket late = hosts.at(0).Send(kEpoch, 1, Tag::Of("late", 0), large.data(), large.size());
  for (uint64_t i = 0; i < 50; i++) {
    const Ticket sent = hosts.at(0).Send(kEpoch, 1, Tag::Of("small", i), small.data(), small.size());
    hosts.at(1).Wait(hosts.at(1).Receive(kEpoch, 0, Tag::Of("small", i), small_got.data(), small.size()));
    hosts.at(0).Wait(sent);
  }
  EXPECT_LT(hosts.at(1).Counted(0).received, large.size()) << "it came before it was asked for";
  hosts.at(1).Wait(hosts.at(1).Receive(kEpoch, 0, Tag::Of("late", 0), large_got.data(), large.size()));
  hosts.at(0).Wait(late);
  EXPECT_EQ(large, large_got);
}

// More small messages than a host keeps, received in another order, with others in between.
TEST(Mesh, UnreceivedSmallMessagesAreBoundedAndDelayNoOther) {
  constexpr uint32_t kMessages = 1000;
  constexpr size_t kBytes = 20000;
  Hosts hosts(2, 2);
  std::vector<std::vector<char>> data;
  std::vector<Ticket> sent;
  for (uint32_t i = 0; i < kMessages; i++) {
    data.push_back(Pattern(kBytes, i));
    sent.push_back(hosts.at(0).Send(kEpoch, 1, Tag::Of("kept", i), data.back().data(), kBytes));
  }
  char word = 'w', word_got = 0;
  const Ticket other = hosts.at(0).Send(kEpoch, 1, Tag::Of("other", 0), &word, 1);
  hosts.at(1).Wait(hosts.at(1).Receive(kEpoch, 0, Tag::Of("other", 0), &word_got, 1));
  EXPECT_EQ(word_got, word);
  EXPECT_LE(hosts.at(1).Counted(0).received, tcp::kUnaskedCredit + (kMessages + 2) * sizeof(FrameHeader));
  std::vector<char> got(kBytes);
  for (uint32_t i = kMessages; i-- > 0;) {
    hosts.at(1).Wait(hosts.at(1).Receive(kEpoch, 0, Tag::Of("kept", i), got.data(), kBytes));
    ASSERT_EQ(got, data[i]);
  }
  for (const Ticket& ticket : sent) hosts.at(0).Wait(ticket);
}

// The receiver has nothing to send, but what it has taken has to be told: the credit comes back, and few messages
// have to be offered.
TEST(Mesh, CreditComesBackFromAHostThatSendsNothing) {
  constexpr uint32_t kMessages = 2000;
  const std::vector<char> data = Pattern(30000, 3);
  Hosts hosts(2, 1);
  hosts.Run([&](uint32_t self, Mesh& mesh) {
    std::vector<char> got(data.size());
    for (uint32_t i = 0; i < kMessages; i++) {
      mesh.Wait(self == 0 ? mesh.Send(kEpoch, 1, Tag::Of("one way", i), data.data(), data.size())
                          : mesh.Receive(kEpoch, 0, Tag::Of("one way", i), got.data(), got.size()));
    }
    EXPECT_TRUE(self == 0 || got == data);
  });
  EXPECT_GT(hosts.at(1).Counted(0).sent, 0u);
  EXPECT_LT(hosts.at(1).Counted(0).sent, kMessages * sizeof(FrameHeader));
}

// Sends so many under a name, and waits until the kernel has them; those that are offered it wouldn't get.
void SendUnasked(Mesh& mesh, uint64_t epoch, const std::string& name, size_t messages, const std::vector<char>& data) {
  std::vector<Ticket> sent;
  for (size_t i = 0; i < messages; i++) {
    sent.push_back(mesh.Send(epoch, 1, Tag::Of(name, i), data.data(), data.size()));
  }
  for (const Ticket& ticket : sent) mesh.Wait(ticket);
}

TEST(Mesh, ANewEpochBeginsWithAllCredit) {
  constexpr size_t kBytes = 20000, kMost = tcp::kUnaskedCredit / tcp::UnaskedCharge(kBytes);
  Hosts hosts(2, 2, {10s});
  const std::vector<char> data = Pattern(kBytes, 4);
  for (uint64_t epoch = kEpoch; epoch < kEpoch + 3; epoch++) {
    if (epoch > kEpoch) {
      for (const uint32_t h : {0U, 1U}) hosts.at(h).Cancel(epoch);
    }
    SendUnasked(hosts.at(0), epoch, "all", kMost, data);
    const Ticket offered = hosts.at(0).Send(epoch, 1, Tag::Of("one more", 0), data.data(), kBytes);
    std::vector<char> got(kBytes);
    // The last comes: its sender has gone over to the new epoch with an account that both keep alike.
    hosts.at(1).Wait(hosts.at(1).Receive(epoch, 0, Tag::Of("all", kMost - 1), got.data(), kBytes));
    EXPECT_EQ(got, data);
    EXPECT_FALSE(offered.IsDone());
  }
}

// More than a host may have offered ahead; but never so many at a time.
TEST(Mesh, OfferedMessagesThatAreReceivedCountNoLonger) {
  constexpr uint32_t kAtOnce = 8000;
  constexpr size_t kLarge = 32 << 10, kKept = tcp::kUnaskedCredit / tcp::UnaskedCharge(kLarge);
  static_assert(tcp::kUnaskedCredit - kKept * tcp::UnaskedCharge(kLarge) < tcp::UnaskedCharge(1));
  Hosts hosts(2, 1);  // on one connection what is sent first comes first
  SendUnasked(hosts.at(0), kEpoch, "kept", kKept, Pattern(kLarge, 5));
  const char one = '1';
  std::vector<char> got(kAtOnce);
  for (uint32_t first = 0; first <= tcp::kMostEarly; first += kAtOnce) {
    std::vector<Ticket> tickets;
    for (uint32_t i = 0; i < kAtOnce; i++) {
      tickets.push_back(hosts.at(0).Send(kEpoch, 1, Tag::Of("offered", first + i), &one, 1));
    }
    for (uint32_t i = kAtOnce; i-- > 0;) {  // when the last has been offered, all have
      tickets.push_back(hosts.at(1).Receive(kEpoch, 0, Tag::Of("offered", first + i), &got[i], 1));
      if (i == kAtOnce - 1) hosts.at(1).Wait(tickets.back());
    }
    for (const Ticket& ticket : tickets) hosts.at(0).Wait(ticket);
    ASSERT_EQ(std::count(got.begin(), got.end(), one), kAtOnce);
    std::fill(got.begin(), got.end(), kCanary);
  }
}

// What comes of messages that were withdrawn is dropped, and charged no longer.
TEST(Mesh, CreditComesBackForWhatIsDropped) {
  constexpr size_t kBytes = 20000, kHalf = tcp::kUnaskedCredit / tcp::UnaskedCharge(kBytes) / 2;
  Hosts hosts(2, 1, {10s});
  const std::vector<char> data = Pattern(kBytes, 6);
  std::vector<char> here(kBytes, kCanary);
  for (uint32_t round = 0; round < 5; round++) {
    const std::string name = "dropped " + std::to_string(round);
    for (size_t i = 0; i < kHalf; i++) hosts.at(1).Receive(kEpoch, 0, Tag::Of(name, i), here.data(), kBytes);
    const auto before = hosts.at(1).Counted(0).received;
    SendUnasked(hosts.at(0), kEpoch, name, kHalf, data);
    EXPECT_TRUE(
        Soon([&] { return hosts.at(1).Counted(0).received == before + kHalf * (kBytes + sizeof(FrameHeader)); }));
    char word = 0;  // which says by the way what was taken
    const Ticket sent = hosts.at(1).Send(kEpoch, 0, Tag::Of("word", round), "w", 1);
    hosts.at(0).Wait(hosts.at(0).Receive(kEpoch, 1, Tag::Of("word", round), &word, 1));
    hosts.at(1).Wait(sent);
  }
  EXPECT_EQ(std::count(here.begin(), here.end(), kCanary), static_cast<std::ptrdiff_t>(kBytes));
}

// The receiver is an epoch behind, so that nothing goes once the kernel's buffers, which are made small, are full.
TEST(Mesh, CreditComesBackForWhatIsWithdrawnBeforeItHasBegun) {
  constexpr size_t kBytes = 20000, kMost = tcp::kUnaskedCredit / tcp::UnaskedCharge(kBytes);
  Ends ends = Connect(2, 1);
  const int room = 64 << 10;
  setsockopt(ends[0][1].connections[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
  setsockopt(ends[1][0].connections[0], SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
  Hosts hosts(std::move(ends), {10s});
  const std::vector<char> data = Pattern(kBytes, 7);
  hosts.at(0).Cancel(kEpoch + 1);
  std::vector<Ticket> sent;
  for (size_t i = 0; i < kMost; i++) {
    sent.push_back(hosts.at(0).Send(kEpoch + 1, 1, Tag::Of("withdrawn", i), data.data(), kBytes));
  }
  const auto begun = [&] {
    return static_cast<size_t>(std::count_if(sent.begin(), sent.end(), [](auto& ticket) { return ticket.IsDone(); }));
  };
  EXPECT_TRUE(Soon([&] { return begun() > 0; }));
  std::this_thread::sleep_for(50ms);  // about as many as will; where this host is slow, some more do
  ASSERT_LT(begun(), kMost / 2);
  const size_t withdrawn = kMost - begun();
  sent.clear();
  hosts.at(1).Cancel(kEpoch + 1);
  // All credit was taken: each of these has some that came back.
  SendUnasked(hosts.at(0), kEpoch + 1, "after", withdrawn / 2, data);
  std::vector<char> got(kBytes);
  hosts.at(1).Wait(hosts.at(1).Receive(kEpoch + 1, 0, Tag::Of("after", 0), got.data(), kBytes));
  EXPECT_EQ(got, data);
}

TEST(Mesh, RefusesWhatCannotBe) {
  Hosts hosts(2, 1);
  Mesh& mesh = hosts.at(0);
  char data[8] = {};
  const Ticket posted = mesh.Receive(kEpoch, 1, Tag::Of("a", 0), data, 8);
  EXPECT_THROW(mesh.Receive(kEpoch, 1, Tag::Of("a", 0), data, 8), Error);
  EXPECT_THROW(mesh.Send(kEpoch, 0, Tag::Of("a", 0), data, 8), Error);
  EXPECT_THROW(mesh.Send(kEpoch, 2, Tag::Of("a", 0), data, 8), Error);
  EXPECT_THROW(mesh.Send(kEpoch + 1, 1, Tag::Of("a", 0), data, 8), Error);
  EXPECT_THROW(mesh.Cancel(kEpoch), Error);
  EXPECT_THROW(Mesh(0, 1, std::vector<tcp::HostEnds>(2), {}), Error);
  EXPECT_THROW(Mesh(2, 1, std::vector<tcp::HostEnds>(2), {}), Error);
  hosts.at(1).Wait(hosts.at(1).Send(kEpoch, 0, Tag::Of("a", 0), "12345678", 8));
  mesh.Wait(posted);  // it is as it was
  EXPECT_EQ(std::memcmp(data, "12345678", 8), 0);
}

TEST(Mesh, AWaitEndsAtItsDeadlineAndWhenItIsInterrupted) {
  Hosts hosts(2, 1, {50ms});
  char data[8];
  const Ticket ticket = hosts.at(0).Receive(kEpoch, 1, Tag::Of("never", 0), data, 8);
  const Error late = Outcome(hosts.at(0), ticket);
  EXPECT_EQ(late.status(), KF_TIMEOUT);
  EXPECT_NE(std::string(late.what()).find(HostName(1)), std::string::npos) << late.what();
  const InterruptCheck check([] { throw Interrupted("a test"); });
  EXPECT_EQ(Outcome(hosts.at(0), ticket).status(), KF_ABORTED);
}

// ---- hosts that give up

// A message of which a part has arrived, and one of which a part has been sent.
TEST(Mesh, AWithdrawnMessagesMemoryIsFree) {
  for (uint32_t round = 0; round < 100 / kSlower; round++) {
    Hosts hosts(2, 2);
    std::mt19937 random(Seed() + round);
    std::vector<char> from = Pattern(8 << 20, round), to(from.size());
    Ticket received = hosts.at(1).Receive(kEpoch, 0, Tag::Of("x", 0), to.data(), to.size());
    Ticket sent = hosts.at(0).Send(kEpoch, 1, Tag::Of("x", 0), from.data(), from.size());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    if (round % 2 == 0) {
      received = Ticket();
      std::fill(to.begin(), to.end(), kCanary);
      hosts.at(0).Wait(sent);  // what comes is dropped
    } else {
      sent = Ticket();
      std::vector<char>().swap(from);
    }
    // The connections are in order.
    char word = 0;
    const Ticket after = hosts.at(0).Send(kEpoch, 1, Tag::Of("after", 0), "w", 1);
    hosts.at(1).Wait(hosts.at(1).Receive(kEpoch, 0, Tag::Of("after", 0), &word, 1));
    EXPECT_EQ(word, 'w');
    if (round % 2 == 0) {
      ASSERT_EQ(std::count(to.begin(), to.end(), kCanary), std::ptrdiff_t(to.size()));
    }
  }
}

// The hosts go over to a new epoch at different times, in the middle of traffic, and use the same tags again.
TEST(Mesh, AfterCancelNoBufferIsTouchedAndNoOldMessageArrives) {
  constexpr uint32_t kMessages = 12;
  const auto size_of = [](uint32_t m) { return m % 2 == 0 ? size_t{20000} : size_t{1} << 20; };
  for (uint32_t round = 0; round < std::max(16 / kSlower, 2u); round++) {
    Hosts hosts(3, 2);
    hosts.Run([&](uint32_t self, Mesh& mesh) {
      std::mt19937 random(Seed() + round * 10 + self);
      std::vector<std::vector<char>> got;
      for (uint64_t epoch = kEpoch; epoch < kEpoch + 3; epoch++) {
        const bool last = epoch == kEpoch + 2;
        std::vector<std::vector<char>> data, here;
        std::vector<Ticket> tickets;
        for (uint32_t other = 0; other < 3; other++) {
          for (uint32_t m = 0; other != self && m < kMessages; m++) {
            const auto what = [&](uint32_t from) { return static_cast<uint32_t>(epoch * 1000 + from * 100 + m); };
            data.push_back(Pattern(size_of(m), what(self)));
            tickets.push_back(mesh.Send(epoch, other, Tag::Of("x", m), data.back().data(), data.back().size()));
            here.emplace_back(size_of(m), kCanary);
            tickets.push_back(mesh.Receive(epoch, other, Tag::Of("x", m), here.back().data(), here.back().size()));
          }
        }
        if (last) {
          for (const Ticket& ticket : tickets) mesh.Wait(ticket);
          uint32_t i = 0;
          for (uint32_t other = 0; other < 3; other++) {
            for (uint32_t m = 0; other != self && m < kMessages; m++) {
              EXPECT_EQ(here[i++] == Pattern(size_of(m), static_cast<uint32_t>(epoch * 1000 + other * 100 + m)), true);
            }
          }
        } else {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
          mesh.Cancel(epoch + 1);
          for (auto& buffer : data)
            std::fill(buffer.begin(), buffer.end(), char(0x77));  // if a thread still read it ...
          for (size_t i = 0; i < tickets.size(); i++) {
            const kf_status status = Outcome(mesh, tickets[i]).status();
            EXPECT_TRUE(status == KF_OK || status == KF_STALE) << status;
            const uint32_t other = i / 2 < kMessages ? (self == 0 ? 1 : 0) : (self == 2 ? 1 : 2);
            const auto what = static_cast<uint32_t>(epoch * 1000 + other * 100 + i / 2 % kMessages);
            if (i % 2 == 1 && status == KF_OK) {  // ... it would be seen here
              EXPECT_EQ(here[i / 2] == Pattern(here[i / 2].size(), what), true);
            }
          }
          for (auto& buffer : here) std::fill(buffer.begin(), buffer.end(), kCanary);
          EXPECT_EQ(Outcome(mesh, mesh.Receive(epoch, (self + 1) % 3, Tag::Of("y", 0), nullptr, 0)).status(), KF_STALE);
          std::move(here.begin(), here.end(), std::back_inserter(got));
        }
      }
      for (const auto& buffer : got) {
        ASSERT_EQ(std::count(buffer.begin(), buffer.end(), kCanary), std::ptrdiff_t(buffer.size()));
      }
    });
  }
}

TEST(Mesh, EndOfAMeshEndsItsTickets) {
  Hosts hosts(2, 2);
  std::vector<char> to(1 << 20), from(1 << 20);
  const Ticket receives = hosts.at(0).Receive(kEpoch, 1, Tag::Of("x", 0), to.data(), to.size());
  const Ticket sends = hosts.at(0).Send(kEpoch, 1, Tag::Of("x", 0), from.data(), from.size());
  const Ticket others = hosts.at(1).Receive(kEpoch, 0, Tag::Of("y", 0), to.data(), to.size());
  hosts.End(0);
  const Error lost = Outcome(hosts.at(1), others);
  EXPECT_EQ(lost.status(), KF_PEER_LOST);
  EXPECT_EQ(Outcome(hosts.at(1), receives).status(), KF_STALE);  // any mesh can tell, of one that has ended
  EXPECT_EQ(Outcome(hosts.at(1), sends).status(), KF_STALE);
}

// What a host has sent is received though it has ended since.
TEST(Mesh, AHostThatEndsWellLeavesNothingBehind) {
  for (uint32_t round = 0; round < 100 / kSlower; round++) {
    Hosts hosts(2, 4);
    const std::vector<char> data = Pattern(6 << 20, round);
    std::vector<char> got(data.size()), small(100);
    const Ticket large = hosts.at(1).Receive(kEpoch, 0, Tag::Of("large", 0), got.data(), got.size());
    hosts.at(0).Wait(hosts.at(0).Send(kEpoch, 1, Tag::Of("large", 0), data.data(), data.size()));
    hosts.at(0).Wait(hosts.at(0).Send(kEpoch, 1, Tag::Of("small", 0), data.data(), small.size()));
    hosts.End(0);
    hosts.at(1).Wait(large);
    ASSERT_EQ(got, data);
  }
}

TEST(Mesh, SaysWhatItsCableCarries) {
  Hosts hosts(2);
  EXPECT_EQ(hosts.at(0).Measure().bytes_per_ms, 0U);
  const std::vector<char> data = Pattern(16 << 20, 1);
  std::vector<char> here(data.size());
  hosts.Run([&](uint32_t self, Mesh& mesh) {
    const Tag tag = Tag::Of("much", 0);
    mesh.Wait(self == 0 ? mesh.Send(kEpoch, 1, tag, data.data(), data.size())
                        : mesh.Receive(kEpoch, 0, tag, here.data(), here.size()));
  });
  EXPECT_GT(hosts.at(0).Measure().bytes_per_ms, 1000U);  // a loopback interface without 8 Mbit/s would be none
  EXPECT_EQ(hosts.at(0).Measure().bytes_per_ms, 0U) << "nothing was sent since";
  EXPECT_EQ(hosts.at(1).Measure().bytes_per_ms, 0U) << "it has only received";
}

}  // namespace
}  // namespace kungfu::testing
