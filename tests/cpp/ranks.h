// Runs the ranks of a cluster as threads over one mapping of a segment, so that sanitizers see all of them.
#ifndef KUNGFU_TESTS_CPP_RANKS_H_
#define KUNGFU_TESTS_CPP_RANKS_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "collectives/host/host_communicator.h"
#include "threads.h"
#include "transport/shm/segment_control_block.h"

namespace kungfu::testing {

class Ranks {
 public:
  explicit Ranks(uint32_t size, CommunicatorOptions options = {std::chrono::seconds(60), std::chrono::seconds(60)},
                 uint32_t cores = 2, bool recovers = false) {
    const int fd = shm::Segment::Create(size, /*cluster_version=*/7, cores, recovers);
    segment_ = std::make_shared<shm::Segment>(fd);
    control_ = std::make_unique<shm::SegmentControlBlock>(segment_);
    close(fd);
    for (uint32_t r = 0; r < size; r++) {
      communicators_.push_back(
          std::make_unique<HostCommunicator>(segment_, r, "127.0.0.1:" + std::to_string(10000 + r), false, options));
    }
    for (auto& communicator : communicators_) communicator->Assemble();
  }

  uint32_t size() const { return segment_->size(); }
  shm::Segment& segment() { return *segment_; }
  shm::SegmentControlBlock& control() { return *control_; }  // the launcher's
  HostCommunicator& at(uint32_t rank) { return *communicators_[rank]; }

  // Calls body(rank, communicator) on one thread a rank; rethrows what the lowest rank threw.
  void Run(const std::function<void(uint32_t, Communicator&)>& body) { RethrowFirst(Collect(body)); }

  // The same, but returns what each rank threw.
  std::vector<std::exception_ptr> Collect(const std::function<void(uint32_t, Communicator&)>& body) {
    return CollectOf(size(), [&](uint32_t r) { body(r, at(r)); });
  }

 private:
  std::shared_ptr<shm::Segment> segment_;
  std::unique_ptr<shm::SegmentControlBlock> control_;
  std::vector<std::unique_ptr<HostCommunicator>> communicators_;
};

// The Error behind an exception pointer; fails loudly where there is none.
inline Error ErrorOf(const std::exception_ptr& thrown) {
  if (!thrown) return Error(KF_OK, "nothing was thrown");
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return error;
  }
}

inline Operation Op(Kind kind, const char* name, const std::vector<kf_tensor>& tensors, kf_dtype dtype,
                    kf_op op = KF_SUM, uint32_t root = 0) {
  return {kind, name, tensors.data(), tensors.size(), dtype, op, root, nullptr};
}

// The participants of the gradient reductions (where there was none, in all-reduces) since the last call.
inline Members TakeParticipants(Communicator& communicator) {
  const Reductions taken = communicator.TakeReductions();
  return communicator.MembersOf(std::max(taken.gradient > 0 ? taken.gradient : taken.any, 1u) - 1);
}

// An all-reduce of equal values, and what has to come out.
inline void Sum(Communicator& communicator, const char* name, float value, float expected, size_t count = 1) {
  std::vector<float> x(count, value), y(count);
  communicator.Run(Op(Kind::kAllReduce, name, {{x.data(), y.data(), count}}, KF_FLOAT32));
  ASSERT_EQ(y, std::vector<float>(count, expected)) << name;
}

}  // namespace kungfu::testing

#endif  // KUNGFU_TESTS_CPP_RANKS_H_
