// How operations between hosts are divided into messages.
#ifndef KUNGFU_COLLECTIVES_HOSTS_PIECES_H_
#define KUNGFU_COLLECTIVES_HOSTS_PIECES_H_

#include <cstddef>
#include <cstdint>

#include "transport/tcp/frame.h"

namespace kungfu::hosts {

// The size of a piece. Data is sent, received and reduced piece by piece.
inline constexpr size_t kPieceBytes = 256 << 10;

// The number of pieces that may arrive while one is reduced. Their memory stays in a core's cache.
inline constexpr size_t kWindow = 8;

// The maximum number of an operation's receives that are posted before they are waited for. The sender keeps a note of
// each posted receive until it sends that piece. It closes the connection to a host that makes it keep too many notes
// (tcp::kMostEarly).
inline constexpr size_t kAhead = 256;

// The maximum number of pieces of an operation. Each piece is sent as a part and as a sum, and a tag has one number
// for each message.
inline constexpr uint64_t kMostPieces = uint64_t{1} << (tcp::Tag::kStepBits - 2);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_PIECES_H_
