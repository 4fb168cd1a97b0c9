// The device layer with ranks as threads, over the stand-ins of the vendors' libraries, so that sanitizers see all of
// it. tests/devices has the same with processes, and much more.
#include "device/device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>

#include "ranks.h"

namespace kungfu::testing {
namespace {

using device::Device;
using device::Driver;
using device::Engine;
using device::Stream;

constexpr uint32_t kRanks = 3;
constexpr size_t kCount = 10000;

class DeviceTest : public ::testing::TestWithParam<std::tuple<kf_device_kind, kf_engine>> {
 protected:
  // One of each for the life of the process, as in the runtime.
  static Driver& TheDriver(kf_device_kind kind) {
    static const std::string folder = KUNGFU_STANDINS;
    static auto* const cuda = device::OpenCuda((folder + "/libcudart.so.12").c_str()).release();
    static auto* const acl = device::OpenAcl((folder + "/libascendcl.so").c_str()).release();
    return kind == KF_DEVICE_GPU ? *cuda : *acl;
  }
  static Engine& TheEngine(kf_device_kind kind) {
    static const std::string folder = KUNGFU_STANDINS;
    static auto* const nccl = device::OpenNccl((folder + "/libnccl.so.2").c_str()).release();
    static auto* const hccl = device::OpenHccl((folder + "/libhccl.so").c_str(), TheDriver(KF_DEVICE_ASCEND)).release();
    return kind == KF_DEVICE_GPU ? *nccl : *hccl;
  }
  void SetUp() override {
    // Where a violation is told: in a file of this test, which has to stay empty.
    log_ = ::testing::TempDir() + "violations-" + std::to_string(getpid());
    std::remove(log_.c_str());
    setenv("STANDIN_LOG", log_.c_str(), 1);
  }
  void TearDown() override { EXPECT_NE(access(log_.c_str(), F_OK), 0) << "violations, see above"; }

  std::string log_;
};

std::vector<float> Brought(uint32_t rank, size_t which) {
  std::vector<float> values(kCount);
  for (size_t i = 0; i < kCount; i++) values[i] = static_cast<float>((i * 7 + which) % 11 + rank);
  return values;
}

TEST_P(DeviceTest, OperationsStartedInAnyOrderByThreadsEndWithTheRightSums) {
  const auto [kind, choice] = GetParam();
  Driver& driver = TheDriver(kind);
  Engine& engine = TheEngine(kind);
  Ranks ranks(kRanks);
  ranks.Run([&, choice = choice](uint32_t rank, Communicator& communicator) {
    driver.Enter({static_cast<int>(rank), nullptr});
    device::Options options;
    options.engine = choice;
    options.chunk_bytes = 4096;
    Device own(driver, &engine, "", options);
    const std::shared_ptr<Communicator> shared(&communicator, [](Communicator*) {});
    const Stream stream = driver.NewStream();
    constexpr size_t kOperations = 6;
    constexpr size_t kBytes = kCount * sizeof(float);
    std::vector<void*> inputs, outputs;
    for (size_t k = 0; k < kOperations; k++) {
      inputs.push_back(driver.Allocate(kBytes));
      outputs.push_back(driver.Allocate(kBytes));
    }
    std::vector<size_t> order(kOperations);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::minstd_rand(rank));
    std::vector<uint64_t> tickets(kOperations);
    for (const size_t k : order) {
      const std::vector<float> values = Brought(rank, k);
      driver.Copy(inputs[k], values.data(), kBytes, KF_HOST_TO_DEVICE, stream);
      const kf_tensor tensor{inputs[k], outputs[k], kCount};
      const std::string name = "group/" + std::to_string(k);
      Operation operation = Op(Kind::kAllReduce, name.c_str(), {}, KF_FLOAT32, k % 2 == 0 ? KF_SUM : KF_MEAN);
      operation.tensors = &tensor;
      operation.num_tensors = 1;
      tickets[k] = own.Start(shared, operation, stream);
    }
    own.Wait(tickets.data(), tickets.size());
    for (size_t k = 0; k < kOperations; k++) {
      std::vector<float> got(kCount);
      driver.Copy(got.data(), outputs[k], kBytes, KF_DEVICE_TO_HOST, stream);
      driver.Synchronize(stream);
      for (size_t i = 0; i < kCount; i++) {
        float want = 0;
        for (uint32_t r = 0; r < kRanks; r++) want += static_cast<float>((i * 7 + k) % 11 + r);
        if (k % 2 != 0) want /= kRanks;
        ASSERT_FLOAT_EQ(got[i], want) << "operation " << k << ", element " << i << ", rank " << rank;
      }
      driver.Free(inputs[k]);
      driver.Free(outputs[k]);
    }
    driver.Delete(stream);
    const std::string in_use = own.EngineInUse();
    EXPECT_EQ(in_use.rfind("staging", 0) == 0, choice == KF_ENGINE_STAGING) << in_use;
  });
}

TEST_P(DeviceTest, ARankThatNeverComesIsATimeoutThatNamesIt) {
  const auto [kind, choice] = GetParam();
  Driver& driver = TheDriver(kind);
  Engine& engine = TheEngine(kind);
  Ranks ranks(kRanks);
  const auto thrown = ranks.Collect([&, choice = choice](uint32_t rank, Communicator& communicator) {
    driver.Enter({static_cast<int>(rank), nullptr});
    device::Options options;
    options.engine = choice;
    options.timeout = std::chrono::milliseconds(300);
    Device own(driver, &engine, "", options);
    const std::shared_ptr<Communicator> shared(&communicator, [](Communicator*) {});
    const Stream stream = driver.NewStream();
    void* const memory = driver.Allocate(64);
    const kf_tensor tensor{memory, memory, 16};
    // Rank 1 brings something else, which the others don't.
    Operation operation = Op(Kind::kBroadcast, rank == 1 ? "other" : "wanted", {}, KF_FLOAT32);
    operation.tensors = &tensor;
    operation.num_tensors = 1;
    const uint64_t ticket = own.Start(shared, operation, stream);
    try {
      own.Wait(&ticket, 1);
    } catch (...) {
      driver.Free(memory);
      driver.Delete(stream);
      throw;
    }
  });
  for (uint32_t r = 0; r < kRanks; r++) {
    const Error error = ErrorOf(thrown[r]);
    EXPECT_EQ(error.status(), KF_TIMEOUT) << error.what();
    EXPECT_NE(std::string(error.what()).find(r == 1 ? "rank 0, rank 2 did not call it" : "rank 1 did not call it"),
              std::string::npos)
        << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, DeviceTest,
                         ::testing::Combine(::testing::Values(KF_DEVICE_GPU, KF_DEVICE_ASCEND),
                                            ::testing::Values(KF_ENGINE_VENDOR, KF_ENGINE_STAGING)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == KF_DEVICE_GPU ? "Gpu" : "Ascend") +
                                  (std::get<1>(info.param) == KF_ENGINE_VENDOR ? "Vendor" : "Staging");
                         });

}  // namespace
}  // namespace kungfu::testing
