#include "device/cuda/cuda_api.h"
#include "device/driver.h"

namespace kungfu::device {
namespace {

class CudaDriver : public Driver {
 public:
  explicit CudaDriver(const char* paths) : cuda_(paths) {}

  int Count() override {
    int count = 0;
    Check(cuda_.GetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
  }
  Place Here() override {
    Place place;
    Check(cuda_.GetDevice(&place.device), "cudaGetDevice");
    return place;
  }
  void Enter(const Place& place) override { Check(cuda_.SetDevice(place.device), "cudaSetDevice"); }
  std::string Identity(int device) override {
    char id[32] = "";
    Check(cuda_.DeviceGetPCIBusId(id, sizeof id, device), "cudaDeviceGetPCIBusId");
    return id;
  }

  void* Allocate(size_t bytes) override {
    void* memory = nullptr;
    Check(cuda_.Malloc(&memory, bytes), "cudaMalloc", bytes);
    return memory;
  }
  void Free(void* memory) override { Check(cuda_.Free(memory), "cudaFree"); }
  void* AllocateHost(size_t bytes) override {
    void* memory = nullptr;
    Check(cuda_.HostAlloc(&memory, bytes, 0), "cudaHostAlloc", bytes);
    return memory;
  }
  void FreeHost(void* memory) override { Check(cuda_.FreeHost(memory), "cudaFreeHost"); }

  Stream NewStream() override {
    Stream stream = nullptr;
    // The new stream and the legacy default stream don't wait for each other.
    Check(cuda_.StreamCreateWithFlags(&stream, cuda::kStreamNonBlocking), "cudaStreamCreateWithFlags");
    return stream;
  }
  void Delete(Stream stream) override { Check(cuda_.StreamDestroy(stream), "cudaStreamDestroy"); }
  void Synchronize(Stream stream) override { Check(cuda_.StreamSynchronize(stream), "cudaStreamSynchronize"); }
  void Abort(Stream) noexcept override {}  // ncclCommAbort ends NCCL's kernels, and no other work of the runtime can
                                           // hang

  Event NewEvent() override {
    Event event = nullptr;
    Check(cuda_.EventCreateWithFlags(&event, cuda::kEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  }
  void DeleteEvent(Event event) override { Check(cuda_.EventDestroy(event), "cudaEventDestroy"); }
  void Record(Event event, Stream stream) override { Check(cuda_.EventRecord(event, stream), "cudaEventRecord"); }
  void Wait(Stream stream, Event event) override {
    Check(cuda_.StreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
  }
  bool Done(Event event) override {
    const int result = cuda_.EventQuery(event);
    if (result == cuda::kNotReady) return false;
    Check(result, "cudaEventQuery");
    return true;
  }

  void Copy(void* to, const void* from, size_t bytes, kf_copy_kind kind, Stream stream) override {
    constexpr int kKinds[] = {cuda::kHostToDevice, cuda::kDeviceToHost, cuda::kDeviceToDevice};
    Check(cuda_.MemcpyAsync(to, from, bytes, kKinds[kind], stream), "cudaMemcpyAsync", bytes);
  }

 private:
  void Check(int error, const char* function, size_t bytes = 0) const {
    if (error == cuda::kSuccess) return;
    cuda_.GetLastError();  // clears the error, which MindSpore's next check would otherwise report
    throw Error(KF_DEVICE, Text(function, bytes > 0 ? Text(" of ", bytes, " bytes") : "", ": ",
                                cuda_.GetErrorName(error), " (", error, "): ", cuda_.GetErrorString(error)));
  }

  const cuda::Runtime cuda_;
};

}  // namespace

std::unique_ptr<Driver> OpenCuda(const char* paths) { return std::make_unique<CudaDriver>(paths); }

}  // namespace kungfu::device
