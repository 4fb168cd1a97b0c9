// Operations between hosts: values and bits, side by side, in groups, and when a host is lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <random>

#include "collectives/dtype.h"
#include "collectives/hosts/operations.h"
#include "deaths.h"
#include "hosts.h"

namespace kungfu::testing {
namespace {

using tcp::Mesh;
using tcp::Tag;

hosts::Group Everyone(Mesh& mesh, uint64_t epoch = kEpoch) {
  Members members(mesh.size());
  for (uint32_t h = 0; h < mesh.size(); h++) members[h] = h;
  return hosts::Group(mesh, epoch, members);
}

// 1 or 2, depending on host and index: sums and products of five are exact in all dtypes.
int Value(uint32_t host, size_t i) { return 1 + static_cast<int>((i * 7 + i / 5 + host * 3) % 5 % 2); }

int Expected(kf_op op, uint32_t hosts, size_t i) {
  int sum = 0, product = 1, least = 2, most = 1;
  for (uint32_t h = 0; h < hosts; h++) {
    const int x = Value(h, i);
    sum += x;
    product *= x;
    least = std::min(least, x);
    most = std::max(most, x);
  }
  switch (op) {
    case KF_SUM:
      return sum;
    case KF_MIN:
      return least;
    case KF_MAX:
      return most;
    case KF_PROD:
      return product;
    case KF_MEAN:
      break;
  }
  return -1;
}

// Writes a small positive integer as an element.
void Store(kf_dtype dtype, int value, char* at) {
  const auto put = [at](auto x) { std::memcpy(at, &x, sizeof x); };
  const auto real = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &real, sizeof bits);
  switch (dtype) {
    case KF_INT8:
    case KF_UINT8:
      return put(static_cast<int8_t>(value));
    case KF_INT16:
    case KF_UINT16:
      return put(static_cast<int16_t>(value));
    case KF_INT32:
    case KF_UINT32:
      return put(static_cast<int32_t>(value));
    case KF_INT64:
    case KF_UINT64:
      return put(static_cast<int64_t>(value));
    case KF_FLOAT16:  // the exponent's bias is 15 instead of 127, and 13 bits of the fraction are 0
      return put(static_cast<uint16_t>((bits >> 13) - ((127 - 15) << 10)));
    case KF_BFLOAT16:
      return put(static_cast<uint16_t>(bits >> 16));
    case KF_FLOAT32:
      return put(real);
    case KF_FLOAT64:
      return put(static_cast<double>(value));
  }
}

void CheckAllReduce(Hosts& hosts, uint64_t sequence, kf_dtype dtype, kf_op op, size_t count) {
  const size_t size = SizeOf(dtype);
  std::vector<char> expected(count * size);
  for (size_t i = 0; i < count; i++) Store(dtype, Expected(op, hosts.size(), i), expected.data() + i * size);
  hosts.Run([&](uint32_t self, Mesh& mesh) {
    const hosts::Group group = Everyone(mesh);
    std::vector<char> input(count * size), output(count * size + 1, 42);
    for (size_t i = 0; i < count; i++) Store(dtype, Value(self, i), input.data() + i * size);
    const std::vector<char> before = input;
    AllReduce(group, Tag::Of("values", 2 * sequence), dtype, op, input.data(), output.data(), count);
    EXPECT_EQ(input == before, true);
    EXPECT_EQ(output.back(), 42) << "wrote past the end";
    output.pop_back();
    EXPECT_EQ(output == expected, true) << NameOf(dtype) << " " << NameOf(op) << " of " << count << " at host " << self
                                        << " of " << hosts.size();
    AllReduce(group, Tag::Of("values", 2 * sequence + 1), dtype, op, input.data(), input.data(), count);
    EXPECT_EQ(input == expected, true) << "in place, at host " << self << " of " << hosts.size();
  });
}

TEST(HostsAllReduce, AgreesWithAPlainSumForEveryDtypeAndReduction) {
  for (uint32_t n = 1; n <= 5; n++) {
    Hosts hosts(n);
    uint64_t sequence = 0;
    for (int dtype = 0; dtype < kNumDtypes; dtype++) {
      for (const kf_op op : {KF_SUM, KF_MIN, KF_MAX, KF_PROD}) {
        for (const size_t bytes : {size_t{8}, size_t{1000}, hosts::kRingBytes + 24}) {
          CheckAllReduce(hosts, sequence++, kf_dtype(dtype), op, bytes / SizeOf(kf_dtype(dtype)));
        }
      }
    }
  }
}

TEST(HostsAllReduce, AgreesForEverySize) {
  const size_t edge = hosts::kRingBytes / 4, piece = hosts::kPieceBytes / 4;
  for (uint32_t n = 2; n <= 5; n++) {
    Hosts hosts(n, n == 3 ? 1 : 3);
    uint64_t sequence = 0;
    for (const size_t count : {size_t{0}, size_t{1}, size_t{2}, size_t{3}, size_t{8191}, size_t{8193}, edge - 1, edge,
                               edge + 1, n * piece - 1, n * piece, n * piece + 1, n * piece * 2 + n, size_t{1234567},
                               (size_t{32} << 20) / 4 / kSlower}) {
      CheckAllReduce(hosts, sequence++, KF_FLOAT32, KF_SUM, count);
    }
  }
}

// Inputs whose sums are rounded, also NaN of different kinds: the same bits everywhere, in every order of arrival.
TEST(HostsAllReduce, AllHostsHaveTheSameBits) {
  for (uint32_t n = 2; n <= 5; n++) {
    Hosts hosts(n);
    for (uint64_t round = 0; round < 6; round++) {
      const size_t count = round % 2 == 0 ? 5003 : 700001;
      std::vector<std::vector<float>> inputs(n, std::vector<float>(count)), outputs = inputs;
      for (uint32_t h = 0; h < n; h++) {
        std::mt19937 random(static_cast<uint32_t>(Seed() + round * 10 + h));
        for (float& x : inputs[h]) x = std::ldexp(static_cast<float>(random()) - 2e9f, static_cast<int>(random() % 20));
        const uint32_t nan = 0x7fc00000u + h;
        std::memcpy(&inputs[h][count / 2], &nan, sizeof nan);
      }
      hosts.Run([&](uint32_t self, Mesh& mesh) {
        AllReduce(Everyone(mesh), Tag::Of("bits", round), KF_FLOAT32, KF_SUM, inputs[self].data(), outputs[self].data(),
                  count);
      });
      for (uint32_t h = 1; h < n; h++) ASSERT_EQ(std::memcmp(outputs[h].data(), outputs[0].data(), count * 4), 0);
      for (size_t i = 0; i < count; i++) {
        double sum = 0, magnitude = 0;
        for (uint32_t h = 0; h < n; h++) {
          sum += inputs[h][i];
          magnitude += std::fabs(inputs[h][i]);
        }
        // n-1 additions, each rounded to 24 bits, of sums no larger than the magnitudes'.
        if (i != count / 2) {
          ASSERT_LE(std::fabs(outputs[0][i] - sum), (n - 1) * magnitude * 0x1p-24) << i;
        }
      }
      EXPECT_TRUE(std::isnan(outputs[0][count / 2]));
    }
  }
}

TEST(HostsAllReduce, RefusesMeansAndWhoIsNotInTheGroup) {
  Hosts hosts(2);
  float x = 1;
  EXPECT_THROW(AllReduce(Everyone(hosts.at(0)), Tag::Of("x", 0), KF_FLOAT32, KF_MEAN, &x, &x, 1), Error);
  EXPECT_THROW(AllReduce(Everyone(hosts.at(0)), Tag::Of("x", 0), kf_dtype(12), KF_SUM, &x, &x, 1), Error);
  EXPECT_THROW(hosts::Group(hosts.at(0), kEpoch, {1}), Error);
  EXPECT_THROW(hosts::Group(hosts.at(0), kEpoch, {0, 2}), Error);
  EXPECT_THROW(hosts::Group(hosts.at(0), kEpoch, {1, 0}), Error);
  EXPECT_THROW(Broadcast(Everyone(hosts.at(0)), Tag::Of("x", 0), 2, &x, 4), Error);
}

TEST(HostsBroadcast, CopiesFromEveryRoot) {
  for (uint32_t n = 1; n <= 5; n++) {
    Hosts hosts(n);
    uint64_t sequence = 0;
    for (uint32_t root = 0; root < n; root++) {
      for (const size_t bytes : {size_t{0}, size_t{1}, size_t{33333}, hosts::kPieceBytes, size_t{3000001}}) {
        const std::vector<char> data = Pattern(bytes, root);
        hosts.Run([&](uint32_t self, Mesh& mesh) {
          std::vector<char> here = self == root ? data : std::vector<char>(bytes);
          here.push_back(42);
          Broadcast(Everyone(mesh), Tag::Of("b", sequence), root, here.data(), bytes);
          EXPECT_EQ(here.back(), 42);
          here.pop_back();
          EXPECT_EQ(here == data, true) << bytes << " bytes from " << root << " at " << self << " of " << n;
        });
        sequence++;
      }
    }
  }
}

TEST(HostsAllGather, HasTheRowsOfAllInTheirOrder) {
  for (uint32_t n = 1; n <= 5; n++) {
    Hosts hosts(n);
    uint64_t sequence = 0;
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{40}, size_t{32769}}) {
      std::vector<char> expected;
      for (uint32_t h = 0; h < n; h++) {
        const std::vector<char> row = Pattern(bytes, h);
        expected.insert(expected.end(), row.begin(), row.end());
      }
      hosts.Run([&](uint32_t self, Mesh& mesh) {
        const std::vector<char> row = Pattern(bytes, self);
        std::vector<char> rows(n * bytes, 42);
        AllGather(Everyone(mesh), Tag::Of("g", 2 * sequence), row.data(), rows.data(), bytes);
        EXPECT_EQ(rows == expected, true) << bytes << " at " << self << " of " << n;
        std::fill(rows.begin(), rows.end(), char(42));  // in place
        std::copy(row.begin(), row.end(), rows.begin() + static_cast<std::ptrdiff_t>(self * bytes));
        AllGather(Everyone(mesh), Tag::Of("g", 2 * sequence + 1), rows.data() + self * bytes, rows.data(), bytes);
        EXPECT_EQ(rows == expected, true) << "in place";
      });
      sequence++;
    }
  }
}

// Threads that each run all of their operations, in an order that differs from host to host, beside each other.
TEST(HostsOperations, RunSideBySideInAnyOrderOfThreads) {
  constexpr uint32_t kThreads = 4;
  for (uint32_t n = 2; n <= 4; n++) {
    Hosts hosts(n);
    hosts.Run([&](uint32_t self, Mesh& mesh) {
      std::vector<std::thread> threads;
      for (uint32_t t = 0; t < kThreads; t++) {
        threads.emplace_back([&, who = (t + self) % kThreads] {  // the same work starts at other times elsewhere
          const hosts::Group group = Everyone(mesh);
          const std::string name = "thread " + std::to_string(who);
          for (uint64_t i = 0; i < 30; i++) {
            const size_t count = i % 7 == 0 ? 300000 + who : 1 + i * 500;
            std::vector<int32_t> x(count, static_cast<int32_t>(self + who + i)), rows(n);
            AllReduce(group, Tag::Of(name, i), KF_INT32, KF_SUM, x.data(), x.data(), count);
            const auto sum = static_cast<int32_t>(n * (n - 1) / 2 + n * (who + i));
            EXPECT_EQ(std::count(x.begin(), x.end(), sum), std::ptrdiff_t(count));
            const auto own = static_cast<int32_t>(self * 100 + who);
            AllGather(group, Tag::Of(name + " rows", i), &own, rows.data(), 4);
            for (uint32_t h = 0; h < n; h++) EXPECT_EQ(rows[h], static_cast<int32_t>(h * 100 + who));
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
  }
}

// Who waits for the lost host learns of it, has all others go over to a new epoch (as the hosts' launchers do), and
// they do it again as a smaller group.
TEST(HostsOperations, GoOnWithoutALostHost) {
  for (uint32_t round = 0; round < 40 / kSlower; round++) {
    const uint32_t n = 3 + round % 3, victim = round % n;
    Hosts hosts(n);
    std::mt19937 random(Seed() + round);
    const auto lives_us = random() % 20000;
    Members living;
    for (uint32_t h = 0; h < n; h++) {
      if (h != victim) living.push_back(h);
    }
    std::once_flag over;
    hosts.Run([&](uint32_t self, Mesh& mesh) {
      if (self == victim) {
        std::this_thread::sleep_for(std::chrono::microseconds(lives_us));
        hosts.End(victim);  // nobody else looks at it
        return;
      }
      std::vector<float> x(200000);
      try {
        // The victim takes part in nothing, so nobody gets further than the first one.
        AllReduce(Everyone(mesh), Tag::Of("x", 0), KF_FLOAT32, KF_SUM, x.data(), x.data(), x.size());
        ADD_FAILURE() << "it went on without host " << victim;
      } catch (const Error& error) {
        EXPECT_TRUE(error.status() == KF_PEER_LOST || error.status() == KF_STALE) << error.what();
        if (error.status() == KF_PEER_LOST) {
          EXPECT_NE(std::string(error.what()).find(HostName(victim)), std::string::npos) << error.what();
        }
        std::call_once(over, [&] {
          EXPECT_EQ(error.status(), KF_PEER_LOST);
          for (const uint32_t h : living) hosts.at(h).Cancel(kEpoch + 1);
        });
      }
      std::fill(x.begin(), x.end(), 1.0f + self);
      AllReduce(hosts::Group(mesh, kEpoch + 1, living), Tag::Of("x", 0), KF_FLOAT32, KF_SUM, x.data(), x.data(),
                x.size());
      float sum = 0;
      for (const uint32_t h : living) sum += 1.0f + h;
      EXPECT_EQ(std::count(x.begin(), x.end(), sum), std::ptrdiff_t(x.size()));
    });
  }
}

}  // namespace
}  // namespace kungfu::testing
