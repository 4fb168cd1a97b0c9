#include "store/other_hosts.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/memory.h"
#include "base/run_time.h"

namespace kungfu::store {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(20);
static_assert(kSlice <= RunTime::kLongestSlice);
constexpr size_t kMostRefusals = 4096;
constexpr size_t kMostKept = 2;  // one for a model, and one for a description

[[noreturn]] void ThrowOver(const std::string& name) {
  throw Error(KF_STALE, Text("request \"", name, "\": the cluster version has ended, and ranks may have changed"));
}

}  // namespace

class OtherHosts::View final : public ModelView {
 public:
  View(std::shared_ptr<OtherHosts> others, uint32_t rank) : others_(std::move(others)), rank_(rank) {}

  bool IsHere() const override { return false; }
  bool OwnerLives() const override { return true; }

  Description Describe(const std::string& name) const override {
    const Answer answer = others_->Fetch(AskOf(Ask::kDescription), name, nullptr);
    return {TextOf(answer.layout), answer.bytes, answer.version};
  }

  uint64_t Request(const std::string& name, const std::string& layout, const kf_blob* blobs,
                   size_t num_blobs) const override {
    Ask ask = AskOf(Ask::kModel);
    if (layout.size() >= kLayoutBytes) return 0;  // no worker can have saved such a layout
    CopyText(ask.layout, layout);
    ask.bytes = TotalBytes(blobs, num_blobs);
    ask.padded = PaddedBytes(blobs, num_blobs);
    const auto take = [&](const char* tensors) {
      for (size_t i = 0; i < num_blobs; i++) {
        if (blobs[i].nbytes > 0) std::memcpy(blobs[i].data, tensors, blobs[i].nbytes);
        tensors += RoundUp(blobs[i].nbytes, kAlign);
      }
    };
    return others_->Fetch(ask, name, take).version;
  }

 private:
  Ask AskOf(Ask::Kind kind) const {
    Ask ask;
    ask.kind = kind;
    ask.rank = rank_;
    return ask;
  }

  const std::shared_ptr<OtherHosts> others_;
  const uint32_t rank_;
};

OtherHosts::OtherHosts(int transport, hosts::Places places, uint32_t rank, std::chrono::milliseconds timeout)
    : places_(std::move(places)), host_(rank < places_.ranks() ? places_.HostOf(rank) : 0), timeout_(timeout) {
  transport_ = fcntl(transport, F_DUPFD_CLOEXEC, 0);
  if (transport_ < 0) throw SystemError("duplicating the socket to this host's model transport");
}

OtherHosts::~OtherHosts() { close(transport_); }

std::shared_ptr<ModelView> OtherHosts::ViewOf(const std::shared_ptr<OtherHosts>& self, uint32_t rank) {
  return std::make_shared<View>(self, rank);
}

// Sends a request and returns its answer. If the answer has tensors, passes them to `take`.
Answer OtherHosts::Fetch(Ask ask, const std::string& name, const Take& take) {
  if (name.empty() || name.size() >= kNameBytes) return {};  // no worker can have saved a model under such a name
  CopyText(ask.name, name);
  auto parcel = ParcelOf(ask.padded);
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ask.number = ++asks_;
  }
  Send(ask, *parcel);
  Await(*parcel, ask, name);  // if this throws, the parcel is left to the transport
  const Answer answer = parcel->answer();
  if (answer.status == KF_STALE) ThrowOver(name);
  if (answer.status != KF_OK) throw Error(static_cast<kf_status>(answer.status), TextOf(answer.text));
  if (answer.version > 0 && take) take(parcel->data());
  Keep(std::move(parcel));
  return answer;
}

std::unique_ptr<Parcel> OtherHosts::ParcelOf(uint64_t padded) {
  std::unique_ptr<Parcel> parcel;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found =
        std::find_if(kept_.begin(), kept_.end(), [&](const auto& kept) { return kept->room() == padded; });
    if (found != kept_.end()) {
      parcel = std::move(*found);
      kept_.erase(found);
    }
  }
  if (parcel == nullptr) return Parcel::Make(padded);
  parcel->done().Clear();
  return parcel;
}

void OtherHosts::Keep(std::unique_ptr<Parcel> parcel) {
  std::lock_guard<std::mutex> guard(mutex_);
  kept_.insert(kept_.begin(), std::move(parcel));
  if (kept_.size() > kMostKept) kept_.pop_back();
}

void OtherHosts::Send(const Ask& ask, const Parcel& parcel) const {
  while (SendWith(transport_, &ask, sizeof ask, parcel.fd()) < 0) {
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) ThrowOver(TextOf(ask.name));
    throw SystemError("sending a request for a model from another host");
  }
}

// Each waiting thread reads all refusals from the socket, including refusals for other threads.
std::optional<Refusal> OtherHosts::RefusalOf(uint32_t number) {
  std::lock_guard<std::mutex> guard(mutex_);
  Refusal refusal;
  while (recv(transport_, &refusal, sizeof refusal, MSG_DONTWAIT) == static_cast<ssize_t>(sizeof refusal)) {
    if (refusal.magic != Refusal::kMagic) continue;
    // No thread waits for the request of this refusal any more.
    if (refusals_.size() >= kMostRefusals) refusals_.erase(refusals_.begin());
    refusals_[refusal.number] = refusal;
  }
  const auto found = refusals_.find(number);
  if (found == refusals_.end()) return std::nullopt;
  refusal = found->second;
  refusals_.erase(found);
  return refusal;
}

void OtherHosts::Await(Parcel& parcel, const Ask& ask, const std::string& name) {
  RunTime waited;
  std::string refused;
  for (;;) {
    const uint32_t armed = parcel.done().Arm();
    if (shm::Counter::Reached(armed, 1)) return;
    InterruptCheck::Run();
    if (closed_.load(std::memory_order_acquire)) ThrowOver(name);
    pollfd socket{transport_, POLLIN, 0};
    if (poll(&socket, 1, 0) > 0 && (socket.revents & (POLLHUP | POLLERR)) != 0) {
      if (parcel.done().Reached(1)) return;  // the transport answered before it ended
      ThrowOver(name);
    }
    const auto refusal = RefusalOf(ask.number);
    if (refusal) {
      refused = TextOf(refusal->text);
      if (refusal->again == 0) throw Error(KF_INTERNAL, Text("request \"", name, "\": ", refused));
    }
    if (waited.Look() > timeout_) {
      throw Error(KF_TIMEOUT, Text("request \"", name, "\": no answer from the host of rank ", ask.rank, " within ",
                                   timeout_.count() / 1000.0, " s", refused.empty() ? "" : ": ", refused));
    }
    parcel.done().Sleep(armed, kSlice);
    if (refusal) Send(ask, parcel);
  }
}

}  // namespace kungfu::store
