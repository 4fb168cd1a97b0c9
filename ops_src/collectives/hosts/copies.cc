#include "collectives/hosts/copies.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/hosts/pieces.h"

namespace kungfu::hosts {

// A host forwards each piece as soon as it has received the piece. A host waits only for its
// parent. The root waits for no host.
void Broadcast(const Group& group, const tcp::Tag& tag, Shape shape, uint32_t root, void* data, size_t bytes) {
  const uint32_t n = group.size();
  if (root >= n)
    throw Error(KF_INVALID, Text("broadcast between hosts: root ", root, " is not a host of a group of ", n));
  const Branch branch = BranchOf(shape, n, root, group.place());
  const bool is_root = group.place() == root;
  auto* const at = static_cast<char*>(data);
  const size_t pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
  const auto bytes_of = [&](size_t piece) { return std::min(kPieceBytes, bytes - piece * kPieceBytes); };

  std::vector<tcp::Mesh::Ticket> received, sent;
  const auto receive = [&](size_t p) {
    received.push_back(group.Receive(branch.parent, tag.Step(p), at + p * kPieceBytes, bytes_of(p)));
  };
  for (size_t p = 0; !is_root && p < std::min(kAhead, pieces); p++) receive(p);
  for (size_t p = 0; p < pieces; p++) {
    if (!is_root) {
      group.Wait(received[p]);
      if (p + kAhead < pieces) receive(p + kAhead);
    }
    for (const uint32_t child : branch.children) {
      sent.push_back(group.Send(child, tag.Step(p), at + p * kPieceBytes, bytes_of(p)));
    }
  }
  group.WaitAll(sent);
}

// Each host sends one message directly to every other host, so each wait depends on only one host.
// Each host begins with the next host in order, so that not all hosts first send to the same host.
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
