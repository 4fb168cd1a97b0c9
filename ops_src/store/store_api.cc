#include "runtime/failure.h"
#include "store/peer_store.h"

namespace {

using kungfu::Guarded;
using kungfu::store::PeerStore;

}  // namespace

kf_status kf_save(const char* name, const char* layout, const kf_blob* blobs, size_t num_blobs, uint64_t* version) {
  return Guarded([&] { *version = PeerStore::Get().Save(name, layout, blobs, num_blobs); });
}

kf_status kf_request(uint32_t rank, const char* name, const char* layout, const kf_blob* blobs, size_t num_blobs,
                     uint64_t* version) {
  return Guarded([&] { *version = PeerStore::Get().Request(rank, name, layout, blobs, num_blobs); });
}

kf_status kf_request_neighbour(const char* name, const char* layout, const kf_blob* blobs, size_t num_blobs,
                               kf_neighbour neighbour, uint64_t seed, int ahead, int64_t* rank, uint64_t* version) {
  return Guarded([&] {
    const auto source = PeerStore::Get().RequestNeighbour(name, layout, blobs, num_blobs, neighbour, seed, ahead != 0);
    *rank = source.rank;
    *version = source.version;
  });
}
