// Collectives between processes for the stand-ins of NCCL and HCCL: over Unix sockets, by a thread of the process that
// made the id. Like the real ones it waits for ever for a rank that is gone, until it is given up.
#ifndef KUNGFU_TESTS_DEVICES_TEAM_H_
#define KUNGFU_TESTS_DEVICES_TEAM_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "simulated.h"

namespace standin {

enum class Dtype : uint32_t {
  kInt8,
  kUint8,
  kInt16,
  kUint16,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64
};
enum class Op : uint32_t { kSum, kProd, kMax, kMin, kAvg };
enum class Kind : uint32_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter };

size_t SizeOf(Dtype dtype);

struct Call {
  Kind kind;
  Dtype dtype;
  Op op;
  uint32_t root;
  uint64_t count;  // elements of the input; of the output in a reduce-scatter
};

constexpr size_t kIdBytes = 64;
std::string NewId();  // starts the thread that serves it

class Team {
 public:
  Team(const std::string& id, uint32_t rank, uint32_t size, int physical_device);
  ~Team();

  bool Connect();  // waits for all ranks; false: given up, or refused
  // The task that takes part in one collective. Input and output are ranges 0 and 1.
  static Task TaskFor(const std::shared_ptr<Team>& team, const Call& call, const void* input, void* output);
  void GiveUp();

  uint32_t size() const { return size_; }
  int device = 0;
  std::atomic<bool> failed{false};  // the other side has said so

 private:
  void Run(const Call& call, const char* input, char* output);

  const std::string id_;
  const uint32_t rank_;
  const uint32_t size_;
  const int physical_device_;
  int socket_ = -1;
  std::atomic<bool> given_up_{false};
};

}  // namespace standin

#endif  // KUNGFU_TESTS_DEVICES_TEAM_H_
