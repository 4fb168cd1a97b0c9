#include "kungfu/store.h"

#include "c_api/failure.h"
#include "runtime/peer.h"

namespace {

using kungfu::Guarded;
using kungfu::Peer;

}  // namespace

kf_status kf_save(const char* name, const char* layout, const kf_blob* blobs, size_t num_blobs, uint64_t* version) {
  return Guarded([&] { *version = Peer::Get().store().Save(name, layout, blobs, num_blobs); });
}

kf_status kf_request_neighbour(const char* name, const char* layout, const kf_blob* blobs, size_t num_blobs,
                               kf_neighbour neighbour, uint64_t seed, int ahead, int64_t* rank, uint64_t* version) {
  return Guarded([&] {
    const auto source =
        Peer::Get().store().RequestNeighbour(name, layout, blobs, num_blobs, neighbour, seed, ahead != 0);
    *rank = source.rank;
    *version = source.version;
  });
}
