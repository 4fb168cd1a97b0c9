// What goes over a connection between two hosts: frames, each a header of fixed size and perhaps a payload behind it.
#ifndef KUNGFU_TRANSPORT_TCP_FRAME_H_
#define KUNGFU_TRANSPORT_TCP_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/hash.h"

namespace kungfu::tcp {

// Of one message. `name` is the hash of the operation's name; `number` its sequence number there (40 bits), then the
// message's number in the operation (24 bits: in pieces of 256 KiB enough for 4 TiB). Two names of one hash would take
// each other's messages: with a million names that happens in one job of 30 million.
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
  kData = 1,   // `length` bytes of the message from `offset` on
  kReady = 2,  // its Receive is posted, for `total` bytes: send it
  kOffer = 3,  // it would be small enough to come unasked, but there is too much of that kind under way: ask for it
  kTaken = 4,  // nothing but what `taken` says
};

// All numbers are little-endian, as they lie in memory here.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
struct FrameHeader {
  static constexpr uint32_t kMagic = 0x3254464b;  // "KFT2"; its last character is the version of the format

  uint32_t magic = kMagic;
  FrameKind kind = FrameKind::kTaken;
  uint64_t epoch = 0;
  Tag tag;
  uint64_t offset = 0;
  uint64_t total = 0;   // bytes of the whole message
  uint64_t taken = 0;   // of the other side's messages that came unasked, in this epoch: see kUnaskedCredit
  uint32_t length = 0;  // bytes behind this header
  uint32_t reserved = 0;
};
static_assert(sizeof(FrameHeader) == 64);

// Messages up to this size are sent without being asked for, and kept until their Receive is posted.
inline constexpr size_t kUnaskedBytes = 32 << 10;
// The payload of a frame, at most: what one connection takes at once of a message that is spread over several. A small
// message that becomes ready meanwhile waits for no more than this.
inline constexpr size_t kFrameBytes = 256 << 10;
// What may be under way unasked, or kept, from one host to another. A message counts with what it costs besides.
inline constexpr size_t kUnaskedCredit = 4 << 20;
inline constexpr size_t UnaskedCharge(size_t bytes) { return bytes + 256; }
// Messages of a host that are asked for or offered, and that no thread here has posted yet. Each costs some hundred
// bytes.
inline constexpr size_t kMostEarly = 1 << 16;

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_FRAME_H_
