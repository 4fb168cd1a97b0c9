// TLS between hosts: which of them get in, and the mesh over it. All other tests of meshes run over it with
// KUNGFU_TEST_TLS (hosts.h), by hand.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <random>

#include "hosts.h"
#include "transport/tcp/mesh.h"
#include "transport/tcp/openssl_api.h"
#include "transport/tcp/tls.h"

// The second one is of a processor, and may not be there for another one.
#if __has_include(<openssl/ssl.h>) && __has_include(<openssl/opensslconf.h>)
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>
namespace kungfu::tcp::openssl {
static_assert(kCtrlMinVersion == SSL_CTRL_SET_MIN_PROTO_VERSION && kTls13 == TLS1_3_VERSION);
static_assert(kPem == SSL_FILETYPE_PEM && kVerifyPeer == (SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT));
static_assert(kWantRead == SSL_ERROR_WANT_READ && kEnded == SSL_ERROR_ZERO_RETURN);
static_assert(kUpdateOneWay == SSL_KEY_UPDATE_NOT_REQUESTED && kBioFlush == BIO_CTRL_FLUSH);
static_assert(kBioRetryRead == (BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY) && kBioSource == BIO_TYPE_SOURCE_SINK);
}  // namespace kungfu::tcp::openssl
#endif

namespace kungfu::testing::tls {
namespace {

using namespace std::chrono_literals;
using tcp::Mesh;
using tcp::Tag;
using tcp::TlsContext;
using tcp::TlsEnd;

// Made once by the openssl command: host.pem, for 10.0.0.2 and node2, of ca.pem; other.pem, which signs itself.
class Tls : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::filesystem::temp_directory_path() / ("kungfu-tls-" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
    const std::string script = R"(
cd "$0" && key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes" && {
openssl req -x509 $key -keyout ca.key -out ca.pem -subj /CN=ca -days 2 &&
openssl req -x509 $key -keyout other.key -out other.pem -subj /CN=other -days 2 &&
openssl req -new $key -keyout host.key -out host.csr -subj /CN=host &&
printf 'subjectAltName=IP:10.0.0.2,DNS:node2,IP:fd00::2' >host.ext &&
openssl x509 -req -in host.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out host.pem -days 2 -extfile host.ext
} >made.log 2>&1)";
    made_ = std::system(("sh -c '" + Quoted(script) + "' '" + folder_.string() + "'").c_str()) == 0;
  }
  static std::string Quoted(const std::string& text) {
    std::string quoted;
    for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return quoted;
  }
  static void TearDownTestSuite() { std::filesystem::remove_all(folder_); }
  void SetUp() override {
    if (!made_) GTEST_SKIP() << "the openssl command makes no certificates here";
    host_ = Of("host");
  }
  static std::shared_ptr<TlsContext> Of(const std::string& who, const std::string& ca = "ca") {
    return std::make_shared<TlsContext>(File(who + ".pem"), File(who + ".key"), File(ca + ".pem"));
  }
  static std::string File(const std::string& name) { return (folder_ / name).string(); }

  // What the two ends say of each other, where they get no further.
  static std::array<std::string, 2> Meet(TlsEnd& caller, TlsEnd& called) {
    std::array<std::string, 2> said;
    for (int turn = 0; turn < 4; turn++) {
      for (const int who : {0, 1}) {
        TlsEnd &from = who == 0 ? caller : called, &to = who == 0 ? called : caller;
        char byte;
        try {
          if (said[who].empty()) from.Read(&byte, 1);
        } catch (const Error& error) {
          said[who] = error.what();
        }
        const std::vector<char> bytes = from.Take();
        to.Put(bytes.data(), bytes.size());
      }
    }
    return said;
  }

  static inline std::filesystem::path folder_;
  static inline bool made_ = false;
  std::shared_ptr<TlsContext> host_;
};

TEST_F(Tls, CalledHostMustBeTheOneThatTheCallerMeans) {
  for (const char* const name : {"10.0.0.2", "node2", "fd00::2", ""}) {
    TlsEnd caller(host_, false, name), called(host_, true, "");
    EXPECT_EQ(Meet(caller, called), (std::array<std::string, 2>{}));
    EXPECT_TRUE(caller.IsEstablished() && called.IsEstablished());
    caller.Write("hello", 5);
    const std::vector<char> bytes = caller.Take();
    EXPECT_EQ(std::string(bytes.begin(), bytes.end()).find("hello"), std::string::npos);
    called.Put(bytes.data(), bytes.size());
    char got[8] = {};
    EXPECT_EQ(called.Read(got, sizeof got), 5u);
    EXPECT_STREQ(got, "hello");
    EXPECT_EQ(called.Read(got, sizeof got), 0u);
  }
  for (const char* const name : {"10.0.0.3", "node3", "fd00::3"}) {
    TlsEnd caller(host_, false, name), called(host_, true, "");
    const auto said = Meet(caller, called);
    EXPECT_NE(said[0].find(std::string("it must be for ") + name), std::string::npos) << said[0];
    EXPECT_NE(said[1].find("it doesn't accept this host's certificate"), std::string::npos) << said[1];
  }
}

// A new key is announced by a record of its own: 5 bytes, encrypted with 17 more (RFC 8446, 4.6.3 and 5.2).
TEST_F(Tls, AKeyIsReplacedAfterItsMostRecords) {
  constexpr uint64_t kMost = 4;
  TlsEnd caller(host_, false, "", kMost), called(host_, true, "", kMost);
  ASSERT_EQ(Meet(caller, called), (std::array<std::string, 2>{}));
  int keys = 0;
  for (char sent = 0; sent < 10; sent++) {
    caller.Write(&sent, 1);
    const std::vector<char> bytes = caller.Take();
    for (size_t at = 0; at + 5 <= bytes.size();) {
      const size_t length =
          static_cast<unsigned char>(bytes[at + 3]) * 256U + static_cast<unsigned char>(bytes[at + 4]);
      keys += length == 5 + 17;
      at += 5 + length;
    }
    EXPECT_EQ(keys, sent / static_cast<int>(kMost)) << int{sent};
    called.Put(bytes.data(), bytes.size());
    char got = -1;
    EXPECT_EQ(called.Read(&got, 1), 1U);
    EXPECT_EQ(got, sent);
  }
}

TEST_F(Tls, PeerOfAnotherAuthorityIsRejectedAtEitherEnd) {
  TlsEnd caller(Of("other"), false, ""), called(host_, true, "");
  auto said = Meet(caller, called);
  EXPECT_NE(said[1].find("its certificate isn't accepted"), std::string::npos) << said[1];
  EXPECT_NE(said[0].find("it doesn't accept this host's certificate"), std::string::npos) << said[0];
  TlsEnd second_caller(host_, false, ""), impostor(Of("other"), true, "");
  said = Meet(second_caller, impostor);
  EXPECT_NE(said[0].find("its certificate isn't accepted"), std::string::npos) << said[0];
}

TEST_F(Tls, MalformedHandshakeIsRejectedInASentence) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; i++) {
    TlsEnd called(host_, true, "");
    std::vector<char> bytes(1 + random() % 300);
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (i % 2 == 0) bytes[0] = 22;
    called.Put(bytes.data(), bytes.size());
    char byte;
    try {
      EXPECT_EQ(called.Read(&byte, 1), 0u);  // it waits for the rest of a record
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), KF_INVALID);
    }
    EXPECT_FALSE(called.IsEstablished());
  }
}

TEST_F(Tls, FilesThatWontDoAreNamed) {
  const auto why = [](const std::string& certificate, const std::string& key, const std::string& ca) {
    try {
      TlsContext(File(certificate), File(key), File(ca));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(why("none.pem", "host.key", "ca.pem").find("the certificate "), std::string::npos);
  EXPECT_NE(why("host.pem", "other.key", "ca.pem").find("the key "), std::string::npos);
  EXPECT_NE(why("host.pem", "host.key", "host.key").find("the CA's certificate "), std::string::npos);
}

TEST_F(Tls, AMeshDeliversWhatManyThreadsSendBothWaysAtOnce) {
  constexpr uint32_t kHosts = 3, kThreads = 3, kMessages = 60;
  Hosts hosts(Connect(kHosts, 2, host_));
  const auto size_of = [](uint32_t what) { return size_t{what} * 7919u % (what % 4 == 0 ? 3'000'000u : 40'000u); };
  hosts.Run([&](uint32_t self, Mesh& mesh) {
    RethrowFirst(CollectOf(kThreads, [&](uint32_t thread) {
      for (uint32_t m = 0; m < kMessages / kSlower + 4; m++) {
        std::vector<std::vector<char>> data(kHosts), got(kHosts);
        std::vector<Mesh::Ticket> tickets;
        const auto what = [&](uint32_t from, uint32_t to) {
          return ((from * kHosts + to) * kThreads + thread) * 100 + m;
        };
        for (uint32_t other = 0; other < kHosts; other++) {
          if (other == self) continue;
          data[other] = Pattern(size_of(what(self, other)), what(self, other));
          got[other].resize(size_of(what(other, self)));
          tickets.push_back(
              mesh.Send(kEpoch, other, Tag::Of("x", what(self, other)), data[other].data(), data[other].size()));
          tickets.push_back(
              mesh.Receive(kEpoch, other, Tag::Of("x", what(other, self)), got[other].data(), got[other].size()));
        }
        for (const auto& ticket : tickets) mesh.Wait(ticket);
        for (uint32_t other = 0; other < kHosts; other++) {
          if (other == self) continue;
          if (got[other] != Pattern(got[other].size(), what(other, self))) throw Error(KF_INTERNAL, "other bytes");
        }
      }
    }));
  });
}

// What was under way when an epoch ended, and what was given up, leaves what comes after it whole.
TEST_F(Tls, AMeshGoesOnAfterMessagesThatWereGivenUpAndEpochsThatEnded) {
  Hosts hosts(Connect(2, 2, host_));
  std::mt19937 random(7);
  for (uint64_t epoch = kEpoch; epoch < kEpoch + 40 / kSlower + 2; epoch++) {
    const std::vector<char> large = Pattern(4 << 20, static_cast<uint32_t>(epoch));
    std::vector<char> got(large.size());
    {
      auto given_up = hosts.at(0).Send(epoch, 1, Tag::Of("given up", 0), large.data(), large.size());
      auto received = hosts.at(1).Receive(epoch, 0, Tag::Of("given up", 0), got.data(), got.size());
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      if (random() % 2 == 0) given_up = {};
      if (random() % 2 == 0) received = {};
    }
    const auto sent = hosts.at(0).Send(epoch, 1, Tag::Of("whole", 0), large.data(), large.size());
    hosts.at(1).Wait(hosts.at(1).Receive(epoch, 0, Tag::Of("whole", 0), got.data(), got.size()));
    hosts.at(0).Wait(sent);
    ASSERT_EQ(got, large);
    const auto late = hosts.at(0).Send(epoch, 1, Tag::Of("late", 0), large.data(), large.size());
    const auto later = hosts.at(1).Receive(epoch, 0, Tag::Of("late", 0), got.data(), got.size());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    const uint32_t first = random() % 2;
    hosts.at(first).Cancel(epoch + 1);
    hosts.at(1 - first).Cancel(epoch + 1);
  }
}

TEST_F(Tls, AHostWhoseBytesWereChangedOnTheirWayIsLost) {
  Ends ends = Connect(2, 1, host_);
  const int wire = dup(ends[1][0].connections[0]);
  Hosts hosts(std::move(ends));
  char byte = 0;
  auto received = hosts.at(0).Receive(kEpoch, 1, Tag::Of("x", 0), &byte, 1);
  ASSERT_EQ(send(wire, "\x17\x03\x03\x00\x20 a record that nobody has encrypted", 40, 0), 40);
  ExpectLost(Outcome(hosts.at(0), received), 1);
  close(wire);
}

TEST_F(Tls, TheEndOfAHostIsItsLoss) {
  Hosts hosts(Connect(3, 2, host_));
  char byte = 0;
  auto received = hosts.at(0).Receive(kEpoch, 1, Tag::Of("x", 0), &byte, 1);
  hosts.End(1);
  ExpectLost(Outcome(hosts.at(0), received), 1);
  const auto sent = hosts.at(2).Send(kEpoch, 0, Tag::Of("x", 0), "y", 1);
  hosts.at(0).Wait(hosts.at(0).Receive(kEpoch, 2, Tag::Of("x", 0), &byte, 1));
  hosts.at(2).Wait(sent);
  EXPECT_EQ(byte, 'y');
}

}  // namespace
}  // namespace kungfu::testing::tls
