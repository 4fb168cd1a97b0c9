// Operations that only copy, so that their bits are the same everywhere.
#include <cstring>

#include "collectives/hosts/operations.h"

namespace kungfu::hosts {

// Along a binomial tree, piece by piece: a host passes on each piece when it has it. Places are counted from the root;
// a host's parent is the place without its lowest bit, its children have one bit more below that. Who has most below
// him is sent to first. A host waits for its parent alone, and the root for nobody.
void Broadcast(const Group& group, const tcp::Tag& tag, uint32_t root, void* data, size_t bytes) {
  const uint32_t n = group.size();
  if (root >= n) throw Error(KF_INVALID, Text("broadcast between hosts: root ", root, " of ", n, " hosts"));
  const uint32_t own = (group.place() + n - root) % n;
  const auto place_of = [&](uint32_t other) { return (other + root) % n; };
  auto* const at = static_cast<char*>(data);
  const size_t pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
  const auto bytes_of = [&](size_t piece) { return std::min(kPieceBytes, bytes - piece * kPieceBytes); };

  std::vector<tcp::Mesh::Ticket> received, sent;
  for (size_t p = 0; own != 0 && p < pieces; p++) {
    received.push_back(group.Receive(place_of(own & (own - 1)), tag.Step(p), at + p * kPieceBytes, bytes_of(p)));
  }
  uint32_t highest = 1;
  while (own == 0 ? highest < n : (own & highest) == 0) highest *= 2;
  for (size_t p = 0; p < pieces; p++) {
    if (own != 0) group.Wait(received[p]);
    for (uint32_t bit = highest / 2; bit > 0; bit /= 2) {
      if (own + bit >= n) continue;
      sent.push_back(group.Send(place_of(own + bit), tag.Step(p), at + p * kPieceBytes, bytes_of(p)));
    }
  }
  group.WaitAll(sent);
}

// One message from each to each, so nobody waits for more than one other at a time; each begins with the one after it,
// so that not all send to the same.
void AllGather(const Group& group, const tcp::Tag& tag, const void* row, void* out, size_t bytes) {
  const uint32_t n = group.size();
  auto* const rows = static_cast<char*>(out);
  std::vector<tcp::Mesh::Ticket> under_way;
  for (uint32_t k = 1; k < n; k++) {
    const uint32_t from = (group.place() + n - k) % n;
    under_way.push_back(group.Receive(from, tag, rows + from * bytes, bytes));
  }
  for (uint32_t k = 1; k < n; k++) under_way.push_back(group.Send((group.place() + k) % n, tag, row, bytes));
  char* const own = rows + group.place() * bytes;
  if (own != row && bytes > 0) std::memcpy(own, row, bytes);
  group.WaitAll(under_way);
}

}  // namespace kungfu::hosts
