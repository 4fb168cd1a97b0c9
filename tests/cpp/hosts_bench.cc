// Microseconds of all-reduces between hosts: processes, joined by TCP over the loopback interface.
//   kungfu_hosts_bench [HOSTS ...]    (2 and 4 where none are named)
// All run the same number of operations, on fresh values each time; the slowest host's times count, and the results are
// checked.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "hosts.h"

namespace kungfu::testing {
namespace {

constexpr uint32_t kConnections = 2;
struct Size {
  size_t bytes;
  int operations;
};
constexpr Size kSizes[] = {{4, 2000}, {64 << 10, 1000}, {1 << 20, 200}, {16 << 20, 30}};
constexpr int kMostOperations = 2000;
constexpr uint32_t kMostHosts = 16;

// [host][size][operation] in microseconds, in memory that all share.
using Times = float[kMostHosts][std::size(kSizes)][kMostOperations];

void Host(uint32_t self, uint32_t hosts, Ends& ends, Times& times) {
  tcp::Mesh mesh(self, 1, std::move(ends[self]), {std::chrono::seconds(60)});
  Members members(hosts);
  std::iota(members.begin(), members.end(), 0u);
  const hosts::Group group(mesh, 1, members);
  uint64_t sequence = 0;
  const auto barrier = [&] {
    std::vector<char> all(hosts);
    AllGather(group, tcp::Tag::Of("barrier", sequence++), "", all.data(), 1);
  };
  for (size_t s = 0; s < std::size(kSizes); s++) {
    std::vector<float> x(kSizes[s].bytes / sizeof(float)), y(x.size());
    for (int i = -5; i < kSizes[s].operations; i++) {
      std::fill(x.begin(), x.end(), static_cast<float>(i + static_cast<int>(self)));
      barrier();
      const auto began = std::chrono::steady_clock::now();
      AllReduce(group, tcp::Tag::Of("x", sequence++), hosts::Strategy::kAuto, KF_FLOAT32, KF_SUM, x.data(), y.data(),
                x.size());
      const std::chrono::duration<float, std::micro> took = std::chrono::steady_clock::now() - began;
      const auto sum = static_cast<float>(static_cast<int>(hosts) * i + static_cast<int>(hosts * (hosts - 1) / 2));
      if (y.front() != sum || y.back() != sum) std::abort();
      if (i >= 0) times[self][s][i] = took.count();
    }
  }
  barrier();
}

void Measure(uint32_t hosts, Times& times) {
  Ends ends = Connect(hosts, kConnections);
  std::vector<pid_t> pids;
  for (uint32_t self = 0; self < hosts; self++) {
    const pid_t pid = fork();
    if (pid == 0) {
      for (uint32_t h = 0; h < hosts; h++) {
        for (const tcp::HostEnds& other : ends[h]) {
          for (const int fd : other.connections) {
            if (h != self) close(fd);
          }
        }
      }
      Host(self, hosts, ends, times);
      _exit(0);
    }
    pids.push_back(pid);
  }
  for (const auto& of_host : ends) {
    for (const tcp::HostEnds& other : of_host) {
      for (const int fd : other.connections) close(fd);
    }
  }
  for (const pid_t pid : pids) {
    int status = 0;
    waitpid(pid, &status, 0);
    if (status != 0) {
      std::fprintf(stderr, "a host ended with status %d\n", status);
      std::exit(1);
    }
  }
  for (size_t s = 0; s < std::size(kSizes); s++) {
    std::vector<float> slowest(static_cast<size_t>(kSizes[s].operations));
    for (size_t i = 0; i < slowest.size(); i++) {
      for (uint32_t h = 0; h < hosts; h++) slowest[i] = std::max(slowest[i], times[h][s][i]);
    }
    std::sort(slowest.begin(), slowest.end());
    const auto at = [&](double share) {
      return slowest[static_cast<size_t>(share * static_cast<double>(slowest.size() - 1))];
    };
    std::printf("%u hosts %9zu bytes: min %9.1f us  p50 %9.1f us  p99 %9.1f us  %7.3f GB/s\n", hosts, kSizes[s].bytes,
                at(0), at(0.5), at(0.99), static_cast<double>(kSizes[s].bytes) / at(0.5) / 1e3);
  }
}

}  // namespace
}  // namespace kungfu::testing

int main(int argc, char** argv) {
  using namespace kungfu::testing;
  auto* const times =
      static_cast<Times*>(mmap(nullptr, sizeof(Times), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<uint32_t> sizes;
  for (int i = 1; i < argc; i++) sizes.push_back(static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10)));
  if (sizes.empty()) sizes = {2, 4};
  for (const uint32_t hosts : sizes) {
    if (hosts < 1 || hosts > kMostHosts) {
      std::fprintf(stderr, "1 to %u hosts, not %u\n", kMostHosts, hosts);
      return 2;
    }
    Measure(hosts, *times);
  }
}
