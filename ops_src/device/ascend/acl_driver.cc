#include <cstdlib>
#include <sstream>

#include "device/ascend/acl_api.h"
#include "device/driver.h"

namespace kungfu::device {
namespace {

class AclDriver : public Driver {
 public:
  explicit AclDriver(const char* paths) : acl_(paths) {
    const int result = acl_.Init(nullptr);
    if (result != acl::kRepeatInitialize) Check(result, "aclInit");  // MindSpore may already have called aclInit
  }

  int Count() override {
    uint32_t count = 0;
    Check(acl_.GetDeviceCount(&count), "aclrtGetDeviceCount");
    return static_cast<int>(count);
  }
  Place Here() override {
    Place place;
    Check(acl_.GetDevice(&place.device), "aclrtGetDevice");
    Check(acl_.GetCurrentContext(&place.context), "aclrtGetCurrentContext");
    return place;
  }
  void Enter(const Place& place) override {
    if (place.context != nullptr) {
      // A stream belongs to a context, and MindSpore's context isn't always the device's default
      // context.
      Check(acl_.SetCurrentContext(place.context), "aclrtSetCurrentContext");
    } else {
      Check(acl_.SetDevice(place.device), "aclrtSetDevice");
    }
  }
  // `device` is an index into the list of devices that the process can see.
  std::string Identity(int device) override {
    const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (visible == nullptr || visible[0] == '\0') return std::to_string(device);
    std::istringstream list(visible);
    std::string id;
    for (int i = 0; i <= device && std::getline(list, id, ','); i++) {
    }
    return id;
  }

  void* Allocate(size_t bytes) override {
    void* memory = nullptr;
    Check(acl_.Malloc(&memory, bytes, acl::kMallocHugeFirst), "aclrtMalloc", bytes);
    return memory;
  }
  void Free(void* memory) override { Check(acl_.Free(memory), "aclrtFree"); }
  void* AllocateHost(size_t bytes) override {
    void* memory = nullptr;
    Check(acl_.MallocHost(&memory, bytes), "aclrtMallocHost", bytes);
    return memory;
  }
  void FreeHost(void* memory) override { Check(acl_.FreeHost(memory), "aclrtFreeHost"); }

  Stream NewStream() override {
    Stream stream = nullptr;
    Check(acl_.CreateStream(&stream), "aclrtCreateStream");
    return stream;
  }
  void Delete(Stream stream) override { Check(acl_.DestroyStream(stream), "aclrtDestroyStream"); }
  void Synchronize(Stream stream) override { Check(acl_.SynchronizeStream(stream), "aclrtSynchronizeStream"); }
  void Abort(Stream stream) noexcept override {
    if (acl_.StreamAbort != nullptr) acl_.StreamAbort(stream);
  }

  Event NewEvent() override {
    Event event = nullptr;
    Check(acl_.CreateEvent(&event), "aclrtCreateEvent");
    return event;
  }
  void DeleteEvent(Event event) override { Check(acl_.DestroyEvent(event), "aclrtDestroyEvent"); }
  void Record(Event event, Stream stream) override { Check(acl_.RecordEvent(event, stream), "aclrtRecordEvent"); }
  void Wait(Stream stream, Event event) override { Check(acl_.StreamWaitEvent(stream, event), "aclrtStreamWaitEvent"); }
  bool Done(Event event) override {
    int status = acl::kNotComplete;
    Check(acl_.QueryEventStatus(event, &status), "aclrtQueryEventStatus");
    return status == acl::kComplete;
  }

  void Copy(void* to, const void* from, size_t bytes, kf_copy_kind kind, Stream stream) override {
    constexpr int kKinds[] = {acl::kHostToDevice, acl::kDeviceToHost, acl::kDeviceToDevice};
    Check(acl_.MemcpyAsync(to, bytes, from, bytes, kKinds[kind], stream), "aclrtMemcpyAsync", bytes);
  }

 private:
  void Check(int error, const char* function, size_t bytes = 0) const {
    if (error == acl::kSuccess) return;
    const char* recent = acl_.GetRecentErrMsg != nullptr ? acl_.GetRecentErrMsg() : nullptr;
    throw Error(KF_DEVICE, Text(function, bytes > 0 ? Text(" of ", bytes, " bytes") : "", ": error ", error,
                                recent != nullptr && recent[0] != '\0' ? ": " : "", recent != nullptr ? recent : ""));
  }

  const acl::Runtime acl_;
};

}  // namespace

std::unique_ptr<Driver> OpenAcl(const char* paths) { return std::make_unique<AclDriver>(paths); }

}  // namespace kungfu::device
