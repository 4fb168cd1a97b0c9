// Frames, messages and requests that no host and no worker sends: one by one, and at random. KUNGFU_FUZZ says how many
// of each kind are tried at random, 2,500 by default; KUNGFU_KILL_SEED is the seed, as it is of failures.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>

#include "collectives/hosts/protocol.h"
#include "hosts.h"
#include "killed_ranks.h"
#include "store/model_transport.h"
#include "store/other_hosts.h"
#include "transport/tcp/mesh.h"

namespace kungfu::testing::strangers {
namespace {

using namespace std::chrono_literals;
using tcp::FrameHeader;
using tcp::FrameKind;
using tcp::Mesh;
using tcp::Tag;
using Ticket = Mesh::Ticket;
using Random = std::mt19937_64;

uint32_t Tries() {
  const char* const given = std::getenv("KUNGFU_FUZZ");
  return given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10)) : 2500;
}

void Fill(Random& random, char* bytes, size_t count) {
  for (size_t i = 0; i < count; i++) bytes[i] = static_cast<char>(random());
}

// A bit or a byte here and there, or all of it.
void Spoil(Random& random, char* bytes, size_t count) {
  if (random() % 20 == 0) return Fill(random, bytes, count);
  for (uint64_t n = 1 + random() % 3; n > 0; n--) {
    char& byte = bytes[random() % count];
    byte = random() % 2 == 0 ? static_cast<char>(byte ^ 1 << random() % 8) : static_cast<char>(random());
  }
}

// ---- frames

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
  Error Commit(uint32_t raw) {
    char byte;
    return Outcome(*mesh_, mesh_->Receive(kEpoch, 2 + raw, Tag::Of("outcome", 0), &byte, 1));
  }
  void ExpectRefused(uint32_t raw, const std::string& why) {
    const Error error = Commit(raw);
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
      {{Data(tag, 0, 140000, 280000)}, 280001, "280000 bytes where 280001 are expected"},
      {{Data(tag, 0, 4, 8)}, 8, "was not requested"},
      {{Data(tag, 0, 140000, 140000)}, 0, "was not requested"},
      {{Data(tag, 0, 200000, 280000), Data(tag, 0, 200000, 280000)}, 280000, "twice"},
      {{Data(tag, 0, 8, 8), Data(tag, 0, 8, 8)}, 0, "twice"},
      {{Bare(FrameKind::kReady, tag, 8), Bare(FrameKind::kReady, tag, 8)}, 0, "twice"},
      {{Bare(FrameKind::kOffer, tag, 8), Bare(FrameKind::kOffer, tag, 8)}, 0, "twice"},
      {{Bare(FrameKind::kOffer, tag, 140000)}, 0, "offered 140000"},
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

// Random, truncated, oversized, replayed and old frames, whole streams of them; beside each an honest host.
TEST_F(Stranger, RandomFramesDisturbNoOther) {
  constexpr uint32_t kStreams = 50, kFrames = 10;
  const std::vector<char> payload = Pattern(tcp::kFrameBytes, 1);
  for (uint32_t m = 0; m < Tries() / kStreams / kFrames; m++) {
    Random random(Seed() + m);
    raws_.clear();
    Make(kStreams);
    std::vector<std::vector<char>> memory;
    std::vector<Ticket> posted;
    std::vector<char> heard;  // a frame that was sent before, by whichever stream
    for (uint32_t s = 0; s < kStreams; s++) {
      for (uint64_t t = 0; t < 3; t++) {
        memory.emplace_back(t == 0 ? 8 : t == 1 ? 30000 : 100000);
        posted.push_back(mesh_->Receive(kEpoch, 2 + s, Tag::Of("x", t), memory.back().data(), memory.back().size()));
      }
      for (uint32_t f = 0; f < kFrames; f++) {
        if (random() % 8 == 0) {
          raws_[s].Write(heard.data(), heard.size(), 20);
          continue;
        }
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
          if (random() % 20 == 0) header.length = static_cast<uint32_t>(random());
        }
        char raw[sizeof header];
        std::memcpy(raw, &header, sizeof raw);
        if (random() % 3 == 0) Spoil(random, raw, sizeof raw);
        raws_[s].Write(raw, random() % 20 == 0 ? random() % sizeof raw : sizeof raw, 20);
        const size_t length = std::min<size_t>(header.length, payload.size());
        raws_[s].Write(payload.data(), random() % 20 == 0 ? random() % (length + 1) : length, 20);
        heard.assign(raw, raw + sizeof raw);
        heard.insert(heard.end(), payload.begin(), payload.begin() + static_cast<ptrdiff_t>(length));
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
      const Error commit = Commit(s);
      ASSERT_EQ(commit.status(), KF_PEER_LOST) << commit.what();
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

// ---- requests of a worker to its host's transport

TEST(StrangeRequests, AtRandomAreRefusedOrMeanWhatTheySay) {
  Random random(Seed());
  uint32_t taken = 0;
  for (uint32_t i = 0; i < Tries(); i++) {
    hosts::Request request;
    request.kind = static_cast<Kind>(random() % (static_cast<uint32_t>(Kind::kBarrier) + 1));
    request.name = std::string(1 + random() % 40, 'n');
    request.what = "what";
    request.count = random() % 1000;
    request.root = static_cast<uint32_t>(random() % 4);
    if (random() % 2 == 0) request.sources = {1, 3};
    if (random() % 2 == 0) {
      request.kind = Kind::kAllReduce;
      request.has_planes = true;
      request.planes.of_rank = {1, 2, 1};
      request.planes.most = 2;
      request.planes.program = {0, 1, Planes::kAdd, 2, 3, Planes::kAdd, Planes::kAdd};
    }
    std::vector<char> bytes = request.Packed();
    if (random() % 3 == 0) bytes.resize(random() % 2 == 0 ? random() % bytes.size() : bytes.size() + random() % 100);
    if (!bytes.empty() && random() % 4 != 0) Spoil(random, bytes.data(), bytes.size());
    const std::vector<char> exact(bytes);  // whose end ASan guards
    const auto found = hosts::Request::From(exact.data(), exact.size());
    if (!found) continue;
    taken++;
    ASSERT_LE(found->count, hosts::Request::kMostElements);
    ASSERT_FALSE(found->name.empty());
    const auto again = hosts::Request::From(found->Packed().data(), found->Packed().size());
    ASSERT_TRUE(again.has_value());
    ASSERT_EQ(again->Packed(), found->Packed());
  }
  EXPECT_GT(taken, Tries() / 20);
  EXPECT_LT(taken, Tries() - Tries() / 20);
}

// ---- models: what another host asks, and what a worker does

using store::Ask;
using store::ModelTransport;

constexpr char kText[] = "what is saved for the others";

Ask ModelAsk(uint32_t rank) {
  Ask ask;
  ask.kind = Ask::kModel;
  ask.rank = rank;
  const kf_blob blob{const_cast<char*>(kText), sizeof kText};  // which no thread writes
  ask.bytes = store::TotalBytes(&blob, 1);
  ask.padded = store::PaddedBytes(&blob, 1);
  CopyText(ask.name, "m");
  CopyText(ask.layout, "one");
  return ask;
}

// Rank 0 is on the host that is tried, rank 1 on the other one.
struct Saved {
  Saved() {
    const kf_blob blob{const_cast<char*>(kText), sizeof kText};
    store.Save("m", "one", &blob, 1);
  }
  std::unique_ptr<ModelTransport> TransportOf(std::vector<tcp::HostEnds> ends) {
    return std::make_unique<ModelTransport>(hosts::Places({0, 1}), 0, std::move(ends), [this](uint32_t) {
      return std::make_shared<store::StoreView>(store.fd(), /*own=*/true);
    });
  }
  store::ModelStore store;
};

TEST(StrangeModels, RandomRequestOfAnotherHostIsAnsweredOrRefused) {
  Saved saved;
  Random random(Seed());
  uint32_t answered = 0, refused = 0;
  for (uint32_t i = 0; i < Tries();) {
    Ends ends = Connect(2, 1);
    Mesh other(1, 1, std::move(ends[1]), tcp::MeshOptions{20s});
    const auto transport = saved.TransportOf(std::move(ends[0]));
    bool listens = true;
    for (uint64_t n = 0; listens && n < 50 && i < Tries(); n++, i++) {
      Ask ask = ModelAsk(0);
      if (random() % 2 == 0) Spoil(random, reinterpret_cast<char*>(&ask), sizeof ask);
      ask.padded %= 1 << 16;  // as much would be kept for it
      const bool is_ask = ask.magic == Ask::kMagic && ask.kind <= Ask::kModel && ask.rank == 0 &&
                          (ask.kind == Ask::kModel || ask.padded == 0) &&
                          std::memchr(ask.name, 0, sizeof ask.name) != nullptr &&
                          std::memchr(ask.layout, 0, sizeof ask.layout) != nullptr;
      const size_t bytes = random() % 20 == 0 ? random() % (2 * sizeof ask) : sizeof ask;
      std::vector<char> message(std::max(bytes, sizeof ask));
      std::memcpy(message.data(), &ask, sizeof ask);
      const Tag tag = Tag::Of("kungfu/models", n);
      store::Answer answer;
      std::vector<char> tensors(ask.padded);
      const Ticket heard = other.Receive(1, 0, tag.Step(1), &answer, sizeof answer);
      const Ticket said = other.Send(1, 0, tag, message.data(), bytes);
      if (!is_ask || bytes != sizeof ask) {
        refused++;
        listens = false;
        while (transport->Unreachable().empty()) std::this_thread::sleep_for(100us);
        EXPECT_EQ(transport->Unreachable()[0].first, 1u);
        break;
      }
      ASSERT_EQ(Outcome(other, heard).status(), KF_OK);
      answered++;
      if (answer.version == 0 || tensors.empty()) continue;
      ASSERT_EQ(Outcome(other, other.Receive(1, 0, tag.Step(2), tensors.data(), tensors.size())).status(), KF_OK);
      ASSERT_EQ(std::memcmp(tensors.data(), kText, std::min(tensors.size(), sizeof kText)), 0);  // it may ask for less
    }
    if (!listens) i++;
  }
  EXPECT_GT(answered, Tries() / 20);
  EXPECT_GT(refused, Tries() / 100);
}

TEST(StrangeModels, RandomRequestOfAWorkerIsAnsweredOrEndsTheConnection) {
  Saved saved;
  Random random(Seed());
  Ends ends = Connect(2, 1);
  const auto transport = saved.TransportOf(std::move(ends[0]));
  ModelTransport other(hosts::Places({0, 1}), 1, std::move(ends[1]),
                       [&](uint32_t) { return std::make_shared<store::StoreView>(saved.store.fd(), /*own=*/true); });
  const int no_parcel = memfd_create("test", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(no_parcel, 1 << 20), 0);
  uint32_t answered = 0, sent_away = 0;
  int worker = transport->Connect();
  for (uint32_t i = 0; i < Tries(); i++) {
    Ask ask = ModelAsk(1);
    if (random() % 2 == 0) Spoil(random, reinterpret_cast<char*>(&ask), sizeof ask);
    const auto parcel = store::Parcel::Make(ModelAsk(1).padded);
    const int with = random() % 10 == 0 ? -1 : random() % 10 == 0 ? no_parcel : parcel->fd();
    const bool fits = ask.padded <= parcel->room() && with == parcel->fd();
    const size_t bytes = random() % 20 == 0 ? 1 + random() % (sizeof ask) : sizeof ask;
    ASSERT_EQ(store::SendWith(worker, &ask, bytes, with), ssize_t(bytes));
    // It is answered in its parcel, or its socket has come to its end.
    for (;;) {
      if (parcel->done().Reached(1)) {
        ASSERT_TRUE(fits && bytes == sizeof ask);
        answered++;
        if (parcel->answer().version > 0 && ask.padded > 0) {
          ASSERT_EQ(std::memcmp(parcel->data(), kText, std::min<size_t>(ask.padded, sizeof kText)), 0);
        }
        break;
      }
      pollfd end{worker, POLLIN, 0};
      if (poll(&end, 1, 1) == 1) {
        sent_away++;
        close(worker);
        worker = transport->Connect();
        break;
      }
    }
  }
  close(worker);
  close(no_parcel);
  EXPECT_GT(answered, Tries() / 20);
  EXPECT_GT(sent_away, Tries() / 20);
}

}  // namespace
}  // namespace kungfu::testing::strangers
