// Hosts of a job in one process: meshes over TCP on the loopback interface, each driven by threads of its own.
#ifndef KUNGFU_TESTS_CPP_HOSTS_H_
#define KUNGFU_TESTS_CPP_HOSTS_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/dtype.h"
#include "collectives/hosts/copies.h"
#include "collectives/hosts/selector.h"
#include "threads.h"
#include "transport/tcp/mesh.h"

namespace kungfu::testing {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr uint32_t kSlower = 8;  // less of it where all takes that much longer
#else
inline constexpr uint32_t kSlower = 1;
#endif

inline constexpr uint64_t kEpoch = 7;  // in which hosts begin

// The two ends of a TCP connection.
inline std::array<int, 2> ConnectedPair() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  const int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listening, any, length) != 0 || listen(listening, 1) != 0 || getsockname(listening, any, &length) != 0 ||
      connect(one, any, length) != 0) {
    throw SystemError("a connection on the loopback interface");
  }
  const int other = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
  close(listening);
  return {one, other};
}

// [host][other host]: the ends of all connections.
using Ends = std::vector<std::vector<tcp::HostEnds>>;

inline std::string HostName(uint32_t host) { return "10.0.0." + std::to_string(host + 1); }

// Takes both to where they may write. Throws what either throws; the other one has been told then.
inline void Handshake(tcp::TlsEnd& caller, tcp::TlsEnd& called) {
  for (int turn = 0; turn < 3; turn++) {
    for (auto [from, to] : {std::pair{&caller, &called}, std::pair{&called, &caller}}) {
      char byte;
      from->Read(&byte, 1);
      const std::vector<char> bytes = from->Take();
      to->Put(bytes.data(), bytes.size());
    }
  }
}

// With `tls`, or where KUNGFU_TEST_TLS names a folder with host.pem, host.key and ca.pem, all of it goes through TLS.
inline Ends Connect(uint32_t hosts, uint32_t connections, std::shared_ptr<tcp::TlsContext> tls = nullptr) {
  if (const char* const folder = std::getenv("KUNGFU_TEST_TLS"); tls == nullptr && folder != nullptr) {
    const std::string in(folder);
    tls = std::make_shared<tcp::TlsContext>(in + "/host.pem", in + "/host.key", in + "/ca.pem");
  }
  Ends ends(hosts, std::vector<tcp::HostEnds>(hosts));
  for (uint32_t a = 0; a < hosts; a++) {
    for (uint32_t b = 0; b < hosts; b++) ends[a][b].name = HostName(b);
    for (uint32_t b = 0; b < a; b++) {
      for (uint32_t c = 0; c < connections; c++) {
        const auto pair = ConnectedPair();
        ends[a][b].connections.push_back(pair[0]);
        ends[b][a].connections.push_back(pair[1]);
        if (tls == nullptr) continue;
        auto& caller = ends[a][b].tls[pair[0]] = std::make_shared<tcp::TlsEnd>(tls, false, "");
        auto& called = ends[b][a].tls[pair[1]] = std::make_shared<tcp::TlsEnd>(tls, true, "");
        Handshake(*caller, *called);
      }
    }
  }
  return ends;
}

class Hosts {
 public:
  explicit Hosts(uint32_t hosts, uint32_t connections = 2, tcp::MeshOptions options = {std::chrono::seconds(60)})
      : Hosts(Connect(hosts, connections), options) {}
  explicit Hosts(Ends ends, tcp::MeshOptions options = {std::chrono::seconds(60)}) {
    for (uint32_t h = 0; h < ends.size(); h++) {
      meshes_.push_back(std::make_unique<tcp::Mesh>(h, kEpoch, std::move(ends[h]), options));
    }
  }

  uint32_t size() const { return static_cast<uint32_t>(meshes_.size()); }
  tcp::Mesh& at(uint32_t host) { return *meshes_[host]; }
  void End(uint32_t host) { meshes_[host] = nullptr; }

  // Calls body(host, mesh) on one thread a host; rethrows what the lowest host threw.
  void Run(const std::function<void(uint32_t, tcp::Mesh&)>& body) { RethrowFirst(Collect(body)); }
  // The same, but returns what each host threw.
  std::vector<std::exception_ptr> Collect(const std::function<void(uint32_t, tcp::Mesh&)>& body) {
    return CollectOf(size(), [&](uint32_t h) { body(h, at(h)); });
  }

 private:
  std::vector<std::unique_ptr<tcp::Mesh>> meshes_;
};

// What waiting for this ticket says; KF_OK where it throws nothing.
inline Error Outcome(tcp::Mesh& mesh, const tcp::Mesh::Ticket& ticket) {
  try {
    mesh.Wait(ticket);
  } catch (const Error& error) {
    return error;
  }
  return Error(KF_OK, "");
}

// That it says that `host` is lost.
inline void ExpectLost(const Error& error, uint32_t host) {
  EXPECT_EQ(error.status(), KF_PEER_LOST) << error.what();
  EXPECT_NE(std::string(error.what()).find(HostName(host)), std::string::npos) << error.what();
}

// By the algorithm of that strategy between hosts that have measured nothing.
inline void AllReduce(const hosts::Group& group, const tcp::Tag& tag, hosts::Strategy strategy, kf_dtype dtype,
                      kf_op op, const void* in, void* out, size_t count) {
  const size_t bytes = count * (IsDtype(dtype) ? SizeOf(dtype) : 1);
  const auto algorithm = hosts::SelectAlgorithm(strategy, std::vector<hosts::Figures>(group.size()), bytes, 1);
  algorithm->Run({group, tag, dtype, op, in, out, count});
}

// Bytes that depend on what they belong to and where they are.
inline std::vector<char> Pattern(size_t count, uint32_t what) {
  std::vector<char> bytes(count);
  uint32_t at = what * 2654435761u;
  for (char& byte : bytes) byte = static_cast<char>((at = at * 1664525u + 1013904223u) >> 24);
  return bytes;
}

}  // namespace kungfu::testing

#endif  // KUNGFU_TESTS_CPP_HOSTS_H_
