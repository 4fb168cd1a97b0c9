// The format of a connection between two hosts: frames. A frame is a header of fixed size, and a payload after it if
// the header says so.
#ifndef KUNGFU_TRANSPORT_TCP_FRAME_H_
#define KUNGFU_TRANSPORT_TCP_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/hash.h"

namespace kungfu::tcp {

// Identifies a message. `name` is the hash of the operation's name. `number` is the operation's sequence number under
// that name (40 bits), then the message's number in the operation (24 bits: enough for 4 TiB in pieces of 256 KiB). If
// two names have the same hash, their messages are confused. With a million names, this happens in one of 30 million
// jobs.
struct Tag {
  static constexpr int kStepBits = 24;

  static Tag Of(std::string_view name, uint64_t sequence) { return Of(Fnv1a(name.data(), name.size()), sequence); }
  static Tag Of(uint64_t name, uint64_t sequence) { return {name, sequence << kStepBits}; }
  Tag Step(uint64_t step) const { return {name, number + step}; }
  bool operator==(const Tag& other) const { return name == other.name && number == other.number; }

  uint64_t name = 0;
  uint64_t number = 0;
};

struct TagHash {
  size_t operator()(const Tag& tag) const { return tag.name ^ tag.number * 0x9e3779b97f4a7c15u; }
};

enum class FrameKind : uint32_t {
  kData = 1,   // `length` bytes of the message, from `offset` on
  kReady = 2,  // the receiver has posted a Receive for `total` bytes: send the message
  kOffer = 3,  // the message is small, but there is no credit to send it unasked: reply with kReady
  kTaken = 4,  // carries nothing but `taken`
};

// All numbers are little-endian, as they are in this machine's memory.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
struct FrameHeader {
  static constexpr uint32_t kMagic = 0x3254464b;  // "KFT2"; the last character is the version of the format

  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kTaken;
  uint64_t epoch = 0;
  Tag tag;
  uint64_t offset = 0;
  uint64_t total = 0;   // bytes of the whole message
  uint64_t taken = 0;   // bytes of unasked messages taken from the other side in this epoch: see kUnaskedCredit
  uint32_t length = 0;  // bytes of the payload
  uint32_t reserved = 0;
};
static_assert(sizeof(FrameHeader) == 64);

// Messages of at most this size are sent unasked, and kept at the receiver until their Receive is posted.
inline constexpr size_t kUnaskedBytes = 32 << 10;
// The maximum payload of a frame. If a message is divided among several connections, each connection accepts this much
// at a time. A small message that becomes ready meanwhile waits for one such frame at most.
inline constexpr size_t kFrameBytes = 256 << 10;
// The maximum size of the unasked messages from one host to another that are being sent or kept. Each message is
// charged its size and a fixed amount for its record.
inline constexpr size_t kUnaskedCredit = 4 << 20;
inline constexpr size_t UnaskedCharge(size_t bytes) { return bytes + 256; }
// The maximum number of a host's requested or offered messages that no thread has posted here yet. Each needs some
// hundred bytes.
inline constexpr size_t kMostEarly = 1 << 16;

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_FRAME_H_
