// The C ABI of the model store. Each worker stores its latest tensors under names that it chooses.
// Other workers copy these tensors without stopping that worker. The rules of c_api.h apply.
#ifndef KUNGFU_STORE_H_
#define KUNGFU_STORE_H_

#include "kungfu/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

// One tensor of a record, given as its bytes. The dtype doesn't matter.
typedef struct kf_blob {
  void* data;
  uint64_t nbytes;
} kf_blob;

typedef enum kf_neighbour {
  KF_RANDOM = 0,       // a random other rank; all are equally likely
  KF_ROUND_ROBIN = 1,  // one rank after another, beginning with the rank after the caller's own
} kf_neighbour;

// Stores a copy of the tensors as the next version of `name`. The first version is 1. `layout`
// describes the tensors in at most 255 bytes. The layout of a name can never change.
KF_API kf_status kf_save(const char* name, const char* layout, const kf_blob* blobs, size_t num_blobs,
                         uint64_t* version);

// Copies the latest version that another rank has saved under `name` into the blobs, and returns
// that rank and version. `neighbour` chooses among the running ranks that have saved a version. The
// first call with a name sets `neighbour` and `seed` for this name. If `ahead` is nonzero, another
// thread chooses and copies the version when this process saves under `name`, and this call only
// collects the copy. *rank is -1 if no rank has saved a version.
KF_API kf_status kf_request_neighbour(const char* name, const char* layout, const kf_blob* blobs, size_t num_blobs,
                                      kf_neighbour neighbour, uint64_t seed, int ahead, int64_t* rank,
                                      uint64_t* version);

#ifdef __cplusplus
}
#endif
#endif  // KUNGFU_STORE_H_
