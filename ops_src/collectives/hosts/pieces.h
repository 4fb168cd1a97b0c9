// How operations between hosts are cut into messages.
#ifndef KUNGFU_COLLECTIVES_HOSTS_PIECES_H_
#define KUNGFU_COLLECTIVES_HOSTS_PIECES_H_

#include <cstddef>
#include <cstdint>

#include "transport/tcp/frame.h"

namespace kungfu::hosts {

// What is sent, received and reduced at a time.
inline constexpr size_t kPieceBytes = 256 << 10;

// Pieces that may arrive while one is reduced: memory that stays in a core's cache.
inline constexpr size_t kWindow = 8;

// Receives of an operation that are posted before they are waited for, at most. The other side keeps a note of each
// until it comes to them, and ends the connection to a host that has it keep too many (tcp::kMostEarly).
inline constexpr size_t kAhead = 256;

// Pieces of an operation, at most: each is sent as a part and as a sum, and a tag has a number for each message.
inline constexpr uint64_t kMostPieces = uint64_t{1} << (tcp::Tag::kStepBits - 2);

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_PIECES_H_
