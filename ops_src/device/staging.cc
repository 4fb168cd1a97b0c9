#include "device/staging.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "collectives/dtype.h"

namespace kungfu::device {

void Poll(const std::function<bool()>& done) {
  const auto begin = std::chrono::steady_clock::now();
  while (!done()) {
    if (std::chrono::steady_clock::now() - begin < std::chrono::microseconds(50)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

// Divides an operation into chunks. A chunk has `ins` input parts and `outs` output parts, stored
// one after another. The outputs of a gather and the inputs of a scatter have one part for each
// rank. All other inputs and outputs have a single part.
class Staging::Plan {
 public:
  Plan(const Operation& operation, uint32_t size, size_t chunk_bytes) : unit(SizeOf(operation.dtype)) {
    const bool scatters = operation.kind == Kind::kReduceScatter;
    ins = scatters ? size : 1;
    outs = operation.kind == Kind::kAllGather ? size : 1;
    const size_t most = std::max<size_t>(1, chunk_bytes / unit / std::max(ins, outs));
    for (size_t t = 0; t < operation.num_tensors; t++) {
      const size_t count = operation.tensors[t].count / ins;
      for (size_t offset = 0; offset < count;) {
        if (chunks.empty() || chunks.back().count == most) chunks.push_back({pieces.size(), pieces.size(), 0});
        Chunk& chunk = chunks.back();
        const size_t n = std::min(count - offset, most - chunk.count);
        pieces.push_back({t, offset, chunk.count, n});
        chunk.last++;
        chunk.count += n;
        offset += n;
      }
    }
    // In host memory, the operation is in place if its inputs and outputs have the same size.
    const size_t largest = chunks.size() == 1 ? chunks[0].count : most;
    out_at = ins == outs ? 0 : AlignedForDevice(largest * ins * unit);
    buffer_bytes = out_at + largest * outs * unit;
  }

  const size_t unit;
  size_t ins, outs;
  size_t out_at, buffer_bytes;
  std::vector<Piece> pieces;
  std::vector<Chunk> chunks;
};

Staging::Staging(Driver& driver, size_t chunk_bytes)
    : driver_(driver),
      chunk_bytes_(chunk_bytes),
      out_(driver.NewStream()),
      in_(driver.NewStream()),
      buffers_{Block(driver, true), Block(driver, true), Block(driver, true), Block(driver, true)} {}

Staging::~Staging() {
  for (const Stream stream : {out_, in_}) {
    try {
      driver_.Delete(stream);
    } catch (const Error&) {  // the device has failed, and the stream no longer exists
    }
  }
}

// Runs `body`, which uses the device, and catches the device's errors. `body` must not call the
// communicator, whose errors must reach the caller.
template <typename Body>
void Staging::Try(const Body& body) {
  if (failure_->has_value()) return;
  try {
    body();
  } catch (const Error& error) {
    *failure_ = error;
  }
}

char* Staging::Buffer(size_t chunk, size_t bytes) {
  char* buffer = nullptr;
  Try([&] { buffer = buffers_[chunk % kBuffers].Get(bytes); });
  if (buffer != nullptr) return buffer;
  no_buffer_.resize(std::max(no_buffer_.size(), bytes));
  return no_buffer_.data();
}

void Staging::Run(Communicator& communicator, const Operation& operation, const Mark& ready,
                  std::optional<Error>* failure) {
  const Plan plan(operation, communicator.size(), chunk_bytes_);
  failure_ = failure;
  // When this function returns, the caller may free the tensors, and the next operation reuses the
  // buffers. So wait for all copies.
  const auto drain = [&] {
    try {
      driver_.Synchronize(out_);
      driver_.Synchronize(in_);
    } catch (const Error&) {  // this failure is already recorded
    }
  };
  try {
    Pipeline(communicator, operation, plan, ready);
  } catch (...) {
    drain();
    throw;
  }
  if (failure->has_value()) drain();
}

void Staging::Pipeline(Communicator& communicator, const Operation& operation, const Plan& plan, const Mark& ready) {
  const bool broadcasts = operation.kind == Kind::kBroadcast;
  const bool sends = !broadcasts || communicator.rank() == operation.root;
  const bool receives = !broadcasts || communicator.rank() != operation.root;
  const std::string name = std::string("device/") + operation.name;
  Try([&] {
    ready.Precede(out_);
    ready.Precede(in_);
  });

  std::vector<Mark> came(plan.chunks.size()), went(plan.chunks.size());
  size_t fetched = 0;
  const auto fetch = [&](size_t c) {
    const Chunk& chunk = plan.chunks[c];
    char* buffer = Buffer(c, plan.buffer_bytes);
    Try([&] {
      if (c >= kBuffers) went[c - kBuffers].Precede(out_);  // the copy to the buffer waits until the buffer is free
      for (size_t p = chunk.first; sends && p < chunk.last; p++) {
        const Piece& piece = plan.pieces[p];
        const kf_tensor& tensor = operation.tensors[piece.tensor];
        for (size_t part = 0; part < plan.ins; part++) {
          const size_t at = part * (tensor.count / plan.ins) + piece.offset;
          driver_.Copy(buffer + (part * chunk.count + piece.at) * plan.unit,
                       static_cast<const char*>(tensor.input) + at * plan.unit, piece.count * plan.unit,
                       KF_DEVICE_TO_HOST, out_);
        }
      }
      came[c] = Mark(driver_, out_);
    });
  };
  const auto send_back = [&](size_t c) {
    const Chunk& chunk = plan.chunks[c];
    const char* buffer = Buffer(c, plan.buffer_bytes) + plan.out_at;
    Try([&] {
      for (size_t p = chunk.first; receives && p < chunk.last; p++) {
        const Piece& piece = plan.pieces[p];
        const kf_tensor& tensor = operation.tensors[piece.tensor];
        for (size_t part = 0; part < plan.outs; part++) {
          const size_t at = part * tensor.count + piece.offset;
          driver_.Copy(static_cast<char*>(tensor.output) + at * plan.unit,
                       buffer + (part * chunk.count + piece.at) * plan.unit, piece.count * plan.unit, KF_HOST_TO_DEVICE,
                       in_);
        }
      }
      went[c] = Mark(driver_, in_);
    });
  };

  for (size_t c = 0; c < plan.chunks.size(); c++) {
    for (; fetched < std::min(c + kBuffers, plan.chunks.size()); fetched++) fetch(fetched);
    Try([&] {
      Poll([&] { return came[c].Done(); });
    });  // this copy waited for the last copy from the buffer to the device
    char* buffer = Buffer(c, plan.buffer_bytes);
    const kf_tensor host{buffer, buffer + plan.out_at, plan.chunks[c].count * plan.ins};
    Operation step = operation;
    step.name = name.c_str();
    step.tensors = &host;
    step.num_tensors = 1;
    communicator.Run(step);
    send_back(c);
  }
  Try([&] {
    for (size_t t = 0; broadcasts && sends && t < operation.num_tensors; t++) {
      const kf_tensor& tensor = operation.tensors[t];
      if (tensor.output == tensor.input || tensor.count == 0) continue;
      driver_.Copy(tensor.output, tensor.input, tensor.count * plan.unit, KF_DEVICE_TO_DEVICE, in_);
    }
    if (plan.chunks.empty()) return;
    const Mark last(driver_, in_);
    Poll([&] { return last.Done(); });
  });
}

}  // namespace kungfu::device
