// Defines how operations between hosts are divided into messages.
#ifndef KUNGFU_COLLECTIVES_HOSTS_PIECES_H_
#define KUNGFU_COLLECTIVES_HOSTS_PIECES_H_

#include <cstddef>
#include <cstdint>

#include "transport/tcp/frame.h"

namespace kungfu::hosts {

// The size of a piece in bytes. Data is sent, received and reduced piece by piece.
inline constexpr size_t kPieceBytes = 256 << 10;

// The number of pieces that may arrive while one piece is reduced. This many pieces fit in a core's
// cache.
inline constexpr size_t kWindow = 8;

// The maximum number of receives that an operation posts before it waits for them. For each posted
// receive, the sender keeps a record until it sends that piece. If a host makes the sender keep too
// many records, the sender closes the connection to that host (tcp::kMostEarly).
inline constexpr size_t kAhead = 256;

// The maximum number of pieces in an operation. Each piece is sent twice, first as a part and then
// as a sum, and a tag has one number for each message.
inline constexpr uint64_t kMostPieces = uint64_t{1} << (tcp::Tag::kStepBits - 2);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_PIECES_H_
