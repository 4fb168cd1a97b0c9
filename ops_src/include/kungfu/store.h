// The C ABI of the model store: each worker keeps its latest tensors under names of its own choice, the others take
// them without stopping it. Rules as in c_api.h.
#ifndef KUNGFU_STORE_H_
#define KUNGFU_STORE_H_

#include "kungfu/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

// One tensor of a record: its bytes, in whatever dtype.
typedef struct kf_blob {
  void* data;
  uint64_t nbytes;
} kf_blob;

typedef enum kf_neighbour {
  KF_RANDOM = 0,       // each of the others is as likely as any other
  KF_ROUND_ROBIN = 1,  // one after another, beginning with the next higher rank
} kf_neighbour;

// Keeps a copy of the tensors as the next version of `name`, from 1. `layout` describes them (at most 255 bytes); a
// name keeps its layout for ever.
KF_API kf_status kf_save(const char* name, const char* layout, const kf_blob* blobs, size_t num_blobs,
                         uint64_t* version);

// Copies the latest version that another rank has saved under `name` into the blobs, and tells which: *rank, one that
// lives and has saved one, chosen by `neighbour` (with `seed`, both of the first call under `name`). With `ahead` it is
// chosen and copied on another thread when this process saves under `name`, and only taken here. *rank -1: no rank has
// one.
KF_API kf_status kf_request_neighbour(const char* name, const char* layout, const kf_blob* blobs, size_t num_blobs,
                                      kf_neighbour neighbour, uint64_t seed, int ahead, int64_t* rank,
                                      uint64_t* version);

#ifdef __cplusplus
}
#endif
#endif  // KUNGFU_STORE_H_
