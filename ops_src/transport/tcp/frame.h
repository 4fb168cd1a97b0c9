// The format of a connection between two hosts: a sequence of frames. A frame is a header of fixed
// size. If the header announces a payload, the payload follows.
#ifndef KUNGFU_TRANSPORT_TCP_FRAME_H_
#define KUNGFU_TRANSPORT_TCP_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/hash.h"

namespace kungfu::tcp {

// Identifies a message. `name` is the hash of the operation's name. `number` consists of the
// operation's sequence number among operations with that name (40 bits), followed by the message's
// number in the operation (24 bits, which is enough for 4 TiB in pieces of 256 KiB). If two names
// have the same hash, their messages are confused. With a million names, this happens in one of 30
// million jobs.
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
  kData = 1,   // `length` bytes of the message, beginning at `offset`
  kReady = 2,  // the receiver has called Receive for `total` bytes, so the message can be sent
  kOffer = 3,  // a small message that can't be sent yet for lack of credit; the receiver must reply with kReady
  kTaken = 4,  // the frame carries only the value of `taken`
};

// All numbers are little-endian, like the numbers in this machine's memory.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
struct FrameHeader {
  static constexpr uint32_t kMagic = 0x3254464b;  // "KFT2"; the last character is the version of the format

  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kTaken;
  uint64_t epoch = 0;
  Tag tag;
  uint64_t offset = 0;
  uint64_t total = 0;   // number of bytes in the whole message
  uint64_t taken = 0;   // bytes of unsolicited messages that were taken from the other side in this epoch: see
                        // kUnaskedCredit
  uint32_t length = 0;  // number of bytes in the payload
  uint32_t reserved = 0;
};
static_assert(sizeof(FrameHeader) == 64);

// Messages of at most this size are sent unsolicited, that is, before the receiver has requested
// them. The receiver keeps such a message until the message's Receive is posted.
inline constexpr size_t kUnaskedBytes = 128 << 10;
// The maximum payload of a frame. If a message is divided among several connections, each
// connection accepts this many bytes at a time. A small message that becomes ready during this time
// waits for at most one such frame.
inline constexpr size_t kFrameBytes = 256 << 10;
// The maximum size of all unsolicited messages from one host to another that are being sent or
// kept. Each message counts with its size and a fixed amount for its record.
inline constexpr size_t kUnaskedCredit = 4 << 20;
inline constexpr size_t UnaskedCharge(size_t bytes) { return bytes + 256; }
// The maximum number of messages that another host has requested or offered, but that no thread on
// this host has posted yet. Each of them needs a few hundred bytes of memory.
inline constexpr size_t kMostEarly = 1 << 16;

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_FRAME_H_
