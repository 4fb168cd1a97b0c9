#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "c_api/failure.h"
#include "device/device.h"
#include "kungfu/device.h"
#include "runtime/background.h"
#include "runtime/peer.h"

namespace {

using kungfu::Error;
using kungfu::Guarded;
using kungfu::Kind;
using kungfu::Operation;
using kungfu::Peer;
using kungfu::Text;
using kungfu::device::Device;
using kungfu::device::Driver;
using kungfu::device::Engine;

// The open device. Never destroyed, because threads may outlive static destructors.
struct Opened {
  std::mutex mutex;
  // `mutex` guards the members below. Once the driver and the engine are set, they stay until the
  // process ends.
  std::unique_ptr<Driver> driver;
  std::unique_ptr<Engine> engine;
  kf_device_kind kind = KF_DEVICE_GPU;
  std::shared_ptr<Device> device;
};
Opened& opened = *new Opened;

std::shared_ptr<Device> Get() {
  std::lock_guard<std::mutex> guard(opened.mutex);
  if (opened.device == nullptr) throw Error(KF_INVALID, "no device is open; call ms_kungfu.init(device=...) first");
  return opened.device;
}

template <typename Body>
kf_status WithDriver(const Body& body) noexcept {
  return Guarded([&] { body(Get()->driver()); });
}

void Open(kf_device_kind kind, const kf_device_options& options) {
  const char* const names[] = {"GPU", "Ascend"};
  if (kind != KF_DEVICE_GPU && kind != KF_DEVICE_ASCEND) {
    throw Error(KF_INVALID, Text("unknown device kind ", int(kind)));
  }
  std::lock_guard<std::mutex> guard(opened.mutex);
  if (opened.driver != nullptr && opened.kind != kind) {
    throw Error(KF_INVALID, Text("can't open ", names[kind], ": this process already uses ", names[opened.kind],
                                 "; a process can use only one kind of device"));
  }
  if (opened.device != nullptr) return;
  if (opened.driver == nullptr) {
    opened.driver = kind == KF_DEVICE_GPU ? kungfu::device::OpenCuda(options.runtime_libraries)
                                          : kungfu::device::OpenAcl(options.runtime_libraries);
    opened.kind = kind;
  }
  std::string why_no_engine;
  if (opened.engine == nullptr) {
    try {
      opened.engine = kind == KF_DEVICE_GPU ? kungfu::device::OpenNccl(options.engine_libraries)
                                            : kungfu::device::OpenHccl(options.engine_libraries, *opened.driver);
    } catch (const Error& error) {
      if (options.engine == KF_ENGINE_VENDOR) throw;
      why_no_engine = error.what();
    }
  }
  int count = 0;
  try {
    count = opened.driver->Count();
  } catch (const Error& error) {  // the kernel driver is missing or too old
    throw Error(KF_MISSING, Text("no ", names[kind], " device can be used: ", error.what()));
  }
  if (count < 1) throw Error(KF_MISSING, Text("this process sees no ", names[kind], " device"));
  kungfu::device::Options own;
  own.engine = options.engine;
  if (options.chunk_bytes > 0) own.chunk_bytes = options.chunk_bytes;
  if (options.timeout_ms > 0) own.timeout = std::chrono::milliseconds(options.timeout_ms);
  opened.device = std::make_shared<Device>(*opened.driver, opened.engine.get(), why_no_engine, own);
}

kf_status Run(const Operation& operation, kf_stream stream) {
  return Guarded([&] {
    const auto device = Get();
    const uint64_t ticket = device->Start(Peer::Get().Current(), operation, stream);
    device->Wait(&ticket, 1);
  });
}

}  // namespace

kf_status kf_device_open(kf_device_kind kind, const kf_device_options* options) {
  return Guarded([&] { Open(kind, options != nullptr ? *options : kf_device_options{}); });
}

void kf_device_close(void) {
  std::shared_ptr<Device> device;
  std::lock_guard<std::mutex> guard(opened.mutex);
  device = std::move(opened.device);
}

const char* kf_device_engine(void) {
  static thread_local std::string text;
  std::lock_guard<std::mutex> guard(opened.mutex);
  text = opened.device == nullptr ? "none" : opened.device->EngineInUse();
  return text.c_str();
}

kf_status kf_device_count(uint32_t* count) {
  return WithDriver([&](Driver& driver) { *count = static_cast<uint32_t>(driver.Count()); });
}
kf_status kf_device_use(uint32_t device) {
  return WithDriver([&](Driver& driver) { driver.Enter({static_cast<int>(device), nullptr}); });
}
kf_status kf_device_malloc(void** memory, uint64_t bytes) {
  return WithDriver([&](Driver& driver) { *memory = driver.Allocate(bytes); });
}
kf_status kf_device_free(void* memory) {
  return WithDriver([&](Driver& driver) { driver.Free(memory); });
}
kf_status kf_device_malloc_host(void** memory, uint64_t bytes) {
  return WithDriver([&](Driver& driver) { *memory = driver.AllocateHost(bytes); });
}
kf_status kf_device_free_host(void* memory) {
  return WithDriver([&](Driver& driver) { driver.FreeHost(memory); });
}
kf_status kf_stream_create(kf_stream* stream) {
  return WithDriver([&](Driver& driver) { *stream = driver.NewStream(); });
}
kf_status kf_stream_destroy(kf_stream stream) {
  return WithDriver([&](Driver& driver) { driver.Delete(stream); });
}
kf_status kf_stream_synchronize(kf_stream stream) {
  return WithDriver([&](Driver& driver) { driver.Synchronize(stream); });
}
kf_status kf_device_copy(void* to, const void* from, uint64_t bytes, kf_copy_kind kind, kf_stream stream) {
  return WithDriver([&](Driver& driver) {
    if (bytes > 0) driver.Copy(to, from, bytes, kind, stream);
  });
}

kf_status kf_device_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype, kf_op op,
                               const char* layout, kf_stream stream) {
  kungfu::DelayForTests();
  return Run({Kind::kAllReduce, name, tensors, num_tensors, dtype, op, 0, layout}, stream);
}

kf_status kf_device_broadcast(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                              uint32_t root, const char* layout, kf_stream stream) {
  return Run({Kind::kBroadcast, name, tensors, num_tensors, dtype, KF_SUM, root, layout}, stream);
}

kf_status kf_device_all_gather(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                               const char* layout, uint32_t ranks, kf_stream stream) {
  Operation operation{Kind::kAllGather, name, tensors, num_tensors, dtype, KF_SUM, 0, layout};
  operation.sized_for_ranks = ranks;
  return Run(operation, stream);
}

kf_status kf_device_reduce_scatter(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                                   kf_op op, const char* layout, uint32_t ranks, kf_stream stream) {
  Operation operation{Kind::kReduceScatter, name, tensors, num_tensors, dtype, op, 0, layout};
  operation.sized_for_ranks = ranks;
  return Run(operation, stream);
}

kf_status kf_device_all_reduce_gradients(const kf_group* groups, size_t num_groups, kf_op op, kf_stream stream) {
  return Guarded([&] {
    const auto device = Get();
    std::vector<uint64_t> tickets;
    for (size_t i = 0; i < num_groups; i++) {
      kungfu::DelayForTests();
      const kf_group& group = groups[i];
      const std::string layout = Peer::Get().WithClaim(group.layout);
      Operation operation{Kind::kAllReduce, group.name, group.tensors, group.num_tensors, group.dtype, op};
      operation.layout = layout.c_str();
      operation.weighting = {/*applies=*/true, Peer::Get().weight()};
      tickets.push_back(device->Start(Peer::Get().Current(), operation, stream));
    }
    device->Wait(tickets.data(), tickets.size());
  });
}

kf_status kf_device_start_all_reduce(const char* name, const kf_tensor* tensors, size_t num_tensors, kf_dtype dtype,
                                     kf_op op, const char* layout, kf_stream stream, uint64_t* ticket) {
  return Guarded([&] {
    const std::string claimed = Peer::Get().WithClaim(layout);
    *ticket = Get()->Start(Peer::Get().Current(),
                           {Kind::kAllReduce, name, tensors, num_tensors, dtype, op, 0, claimed.c_str()}, stream);
  });
}

kf_status kf_device_wait(const uint64_t* tickets, size_t num_tickets) {
  return Guarded([&] { Get()->Wait(tickets, num_tickets); });
}
