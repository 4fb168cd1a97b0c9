#include "team.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

namespace standin {
namespace {

bool Send(int fd, const void* data, size_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool Receive(int fd, void* data, size_t bytes) {
  for (char* at = static_cast<char*>(data); bytes > 0;) {
    const ssize_t n = recv(fd, at, bytes, 0);
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

socklen_t AddressOf(const std::string& id, sockaddr_un* address) {
  std::memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, id.data(), std::strlen(id.c_str()));  // abstract: nothing to leak
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + std::strlen(id.c_str()));
}

float FromHalf(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 0) return (sign ? -1.f : 1.f) * std::ldexp(static_cast<float>(fraction), -24);
  const uint32_t word = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

uint16_t ToHalf(float value) {
  const float magnitude = std::fabs(value);
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  if (std::isnan(value)) return 0x7e00;
  if (magnitude >= 65520.f) return static_cast<uint16_t>(sign | 0x7c00);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int scale = std::max(exponent - 11, -24);  // the value of the lowest bit is 2^scale
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -scale)));
  return static_cast<uint16_t>(
      sign | (units < 1024 && scale == -24 ? units : (static_cast<uint32_t>(scale + 24) << 10) + units));
}

float FromBfloat(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

uint16_t ToBfloat(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

template <typename T>
T Combine(T a, T b, Op op) {
  switch (op) {
    case Op::kSum:
    case Op::kAvg:
      return static_cast<T>(a + b);
    case Op::kProd:
      return static_cast<T>(a * b);
    case Op::kMax:
      return std::max(a, b);
    case Op::kMin:
      return std::min(a, b);
  }
  return a;
}

// By way of `Wide`, in which integers wrap and 16-bit floats don't lose their bits between two steps.
template <typename T, typename Wide, typename Read, typename Write>
void ReduceAs(const std::vector<std::vector<char>>& inputs, char* out, uint64_t count, Op op, Read read, Write write) {
  for (uint64_t i = 0; i < count; i++) {
    Wide result{};
    for (size_t r = 0; r < inputs.size(); r++) {
      T element;
      std::memcpy(&element, inputs[r].data() + i * sizeof(T), sizeof(T));
      const Wide value = read(element);
      result = r == 0 ? value : Combine<Wide>(result, value, op);
    }
    if (op == Op::kAvg) result = static_cast<Wide>(result / static_cast<Wide>(inputs.size()));
    const T element = write(result);
    std::memcpy(out + i * sizeof(T), &element, sizeof(T));
  }
}

template <typename T>
void ReducePlain(const std::vector<std::vector<char>>& inputs, char* out, uint64_t count, Op op) {
  using Wide =
      std::conditional_t<std::is_floating_point_v<T>, T, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
  ReduceAs<T, Wide>(
      inputs, out, count, op, [](T x) { return static_cast<Wide>(x); }, [](Wide x) { return static_cast<T>(x); });
}

void Reduce(const std::vector<std::vector<char>>& inputs, char* out, uint64_t count, Dtype dtype, Op op) {
  switch (dtype) {
    case Dtype::kInt8:
      return ReducePlain<int8_t>(inputs, out, count, op);
    case Dtype::kUint8:
      return ReducePlain<uint8_t>(inputs, out, count, op);
    case Dtype::kInt16:
      return ReducePlain<int16_t>(inputs, out, count, op);
    case Dtype::kUint16:
      return ReducePlain<uint16_t>(inputs, out, count, op);
    case Dtype::kInt32:
      return ReducePlain<int32_t>(inputs, out, count, op);
    case Dtype::kUint32:
      return ReducePlain<uint32_t>(inputs, out, count, op);
    case Dtype::kInt64:
      return ReducePlain<int64_t>(inputs, out, count, op);
    case Dtype::kUint64:
      return ReducePlain<uint64_t>(inputs, out, count, op);
    case Dtype::kFloat16:
      return ReduceAs<uint16_t, float>(inputs, out, count, op, FromHalf, ToHalf);
    case Dtype::kBfloat16:
      return ReduceAs<uint16_t, float>(inputs, out, count, op, FromBfloat, ToBfloat);
    case Dtype::kFloat32:
      return ReducePlain<float>(inputs, out, count, op);
    case Dtype::kFloat64:
      return ReducePlain<double>(inputs, out, count, op);
  }
}

struct Hello {
  uint32_t rank, size;
  int32_t physical_device;
};

std::string Describe(const Call& call) {
  const char* const kinds[] = {"AllReduce", "Broadcast", "AllGather", "ReduceScatter"};
  return std::string(kinds[static_cast<int>(call.kind)]) + " of " + std::to_string(call.count) + " elements of type " +
         std::to_string(static_cast<int>(call.dtype)) + ", op " + std::to_string(static_cast<int>(call.op)) +
         ", root " + std::to_string(call.root);
}

bool Same(const Call& a, const Call& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.count == b.count;
}

size_t InputBytes(const Call& call, uint32_t rank, uint32_t size) {
  const size_t bytes = call.count * SizeOf(call.dtype);
  if (call.kind == Kind::kBroadcast) return rank == call.root ? bytes : 0;
  return call.kind == Kind::kReduceScatter ? bytes * size : bytes;
}
size_t OutputBytes(const Call& call, uint32_t size) {
  return call.count * SizeOf(call.dtype) * (call.kind == Kind::kAllGather ? size : 1);
}

// What the ranks of one id get. Ends when a rank is gone; the others then wait until they give up.
class Server {
 public:
  explicit Server(int listener) : listener_(listener) {}

  void Run() {
    if (Gather()) {
      while (Serve()) {
      }
    }
    // The ranks see nothing of that; their sockets are closed when all of them are gone.
    for (const int fd : fds_) {
      char rest[4096];
      while (fd >= 0 && recv(fd, rest, sizeof rest, 0) > 0) {
      }
    }
    for (const int fd : fds_) close(fd);
    close(listener_);
  }

 private:
  bool Gather() {
    std::vector<Hello> hellos;
    do {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      Hello hello;
      if (fd < 0 || !Receive(fd, &hello, sizeof hello)) return false;
      if (hellos.empty()) fds_.assign(hello.size, -1);
      bool fine = hello.size == fds_.size() && hello.rank < fds_.size() && fds_[hello.rank] < 0;
      for (const Hello& other : hellos) fine = fine && other.physical_device != hello.physical_device;
      if (!fine) {
        Violation("a team with two ranks on one device, two equal ranks, or ranks that expect another size");
        return false;
      }
      fds_[hello.rank] = fd;
      hellos.push_back(hello);
    } while (hellos.size() < fds_.size());
    return Answer(1);
  }

  bool Answer(char word) {
    for (const int fd : fds_) {
      if (!Send(fd, &word, 1)) return false;
    }
    return true;
  }

  bool Serve() {
    const auto size = static_cast<uint32_t>(fds_.size());
    std::vector<Call> calls(size);
    for (uint32_t r = 0; r < size; r++) {
      if (!Receive(fds_[r], &calls[r], sizeof(Call))) return false;
    }
    for (uint32_t r = 1; r < size; r++) {
      if (Same(calls[r], calls[0])) continue;
      Violation("the ranks don't run the same collective: rank 0 " + Describe(calls[0]) + ", rank " +
                std::to_string(r) + " " + Describe(calls[r]));
      Answer(0);
      return false;
    }
    const Call& call = calls[0];
    std::vector<std::vector<char>> inputs(size);
    for (uint32_t r = 0; r < size; r++) {
      inputs[r].resize(InputBytes(call, r, size));
      if (!Receive(fds_[r], inputs[r].data(), inputs[r].size())) return false;
    }
    const size_t bytes = call.count * SizeOf(call.dtype);
    std::vector<char> output;
    switch (call.kind) {
      case Kind::kAllReduce:
        output.resize(bytes);
        Reduce(inputs, output.data(), call.count, call.dtype, call.op);
        break;
      case Kind::kReduceScatter:
        output.resize(bytes * size);
        Reduce(inputs, output.data(), call.count * size, call.dtype, call.op);
        break;
      case Kind::kBroadcast:
        output = inputs[call.root];
        break;
      case Kind::kAllGather:
        for (const auto& input : inputs) output.insert(output.end(), input.begin(), input.end());
        break;
    }
    for (uint32_t r = 0; r < size; r++) {
      const char word = 1;
      const char* part = output.data() + (call.kind == Kind::kReduceScatter ? r * bytes : 0);
      if (!Send(fds_[r], &word, 1) || !Send(fds_[r], part, OutputBytes(call, size))) return false;
    }
    return true;
  }

  const int listener_;
  std::vector<int> fds_;  // by rank
};

}  // namespace

size_t SizeOf(Dtype dtype) {
  constexpr size_t kSizes[] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
  return kSizes[static_cast<int>(dtype)];
}

std::string NewId() {
  std::random_device random;
  std::string id = "kungfu-standin-" + std::to_string(getpid()) + "-" + std::to_string(random());
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address;
  const socklen_t length = AddressOf(id, &address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener, 64) != 0) {
    Violation("no socket for a team");
  }
  std::thread([listener] { Server(listener).Run(); }).detach();
  id.resize(kIdBytes);
  return id;
}

Team::Team(const std::string& id, uint32_t rank, uint32_t size, int physical_device)
    : id_(id), rank_(rank), size_(size), physical_device_(physical_device) {
  device = CurrentDevice();
  socket_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

Team::~Team() { close(socket_); }

bool Team::Connect() {
  sockaddr_un address;
  const socklen_t length = AddressOf(id_, &address);
  const Hello hello{rank_, size_, physical_device_};
  char word = 0;
  return connect(socket_, reinterpret_cast<sockaddr*>(&address), length) == 0 && Send(socket_, &hello, sizeof hello) &&
         Receive(socket_, &word, 1) && word == 1;
}

void Team::GiveUp() {
  given_up_ = true;
  shutdown(socket_, SHUT_RDWR);
}

Task Team::TaskFor(const std::shared_ptr<Team>& team, const Call& call, const void* input, void* output) {
  Task task;
  task.ranges.push_back({const_cast<void*>(input), InputBytes(call, team->rank_, team->size_), false});
  task.ranges.push_back({output, OutputBytes(call, team->size_), true});
  task.run = [team, call](const std::vector<char*>& ranges) { team->Run(call, ranges[0], ranges[1]); };
  task.interrupt = [team] { team->GiveUp(); };
  return task;
}

void Team::Run(const Call& call, const char* input, char* output) {
  char word = 0;
  if (Send(socket_, &call, sizeof call) && Send(socket_, input, InputBytes(call, rank_, size_)) &&
      Receive(socket_, &word, 1) && word == 1 && Receive(socket_, output, OutputBytes(call, size_))) {
    return;
  }
  // No rank may take what is there for a result.
  std::memset(output, 0xee, OutputBytes(call, size_));
  if (!given_up_) failed = true;
}

}  // namespace standin
