// The memory in which a worker keeps its latest models. Other workers on the same host read this
// memory while that worker trains.
//
// Each worker has one such memory, which is an anonymous file like a segment. Only that worker
// writes to it, and the memory outlives the cluster versions. The other workers get a read-only
// descriptor. A *record* belongs to one name. It contains the layout, and two buffers that
// successive versions use alternately. Neither the writer nor a reader waits:
//
//   writer, version v into buffer v % 2          reader
//     begun[v % 2] = v                             v = latest (none: 0)
//     the words of the buffer                      the words of buffer v % 2
//     latest = v                                   begun[v % 2] == v? done : again
//
// Only the owner writes words, each with a release store. Readers use acquire loads (on x86 these
// are plain moves).
//
// 1. A read is whole. The reader has read `latest == v`, so all words of version v were written
// before that. The buffer is written again only for version v + 2, and `begun` announces this
// first. So a reader that has read any word of v + 2 also reads begun == v + 2. The reader then
// starts again with the newer `latest`. Repetitions are rare, because a copy may take as long as a
// whole save and the time between two saves (a training step).
// Test: ModelStore.ReadsAreWholeWhileTheOwnerSavesWithoutPause
//
// 2. The writer may fail at any point. While it writes version v, `latest` is v - 1, and the buffer
// of version v - 1 isn't written. `records` counts a record only when the record is complete, and a
// record never moves or shrinks. If the writer fails after the file has grown, the file has an
// additional part that no reader uses. A lock on the file shows whether the owner is running,
// because the kernel drops the lock when the owner ends.
// Test: ModelStore.AWriterThatIsKilledLeavesWholeModels
#ifndef KUNGFU_STORE_MODEL_STORE_H_
#define KUNGFU_STORE_MODEL_STORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/forks.h"
#include "base/mapping.h"
#include "kungfu/store.h"

namespace kungfu::store {

inline constexpr uint32_t kRecords = 256;
inline constexpr size_t kNameBytes = 128;
inline constexpr size_t kLayoutBytes = 256;

struct Header;
struct Record;

// The owner's access to its memory. Thread-safe.
class ModelStore {
 public:
  ModelStore();
  ~ModelStore();
  ModelStore(const ModelStore&) = delete;
  ModelStore& operator=(const ModelStore&) = delete;

  // Returns a read-only descriptor, which this object owns.
  int fd() const { return read_fd_; }

  // Saves a copy of the tensors as the next version of `name`, and returns the number of that
  // version (1 or more). Never waits for a reader. Throws ValueError if `name` had another layout
  // or other sizes before.
  uint64_t Save(const std::string& name, const std::string& layout, const kf_blob* blobs, size_t num_blobs);

 private:
  struct Own {
    Record* record;
    std::unique_ptr<Mapping> buffers[2];
  };
  Own& OwnRecord(const std::string& name, const std::string& layout, uint64_t bytes);

  const OneProcess process_;  // detects a forked child, which would write in its parent's name
  std::mutex mutex_;
  int fd_ = -1;
  int read_fd_ = -1;
  size_t end_ = 0;  // number of bytes in the file; guarded by mutex_
  std::unique_ptr<Mapping> head_;
  std::map<std::string, Own> own_;  // guarded by mutex_
};

struct Description {
  std::string layout;
  uint64_t bytes = 0;    // number of bytes in all tensors, without the padding between them
  uint64_t version = 0;  // the latest version, or 0 if nothing was saved
};

// Access to the models of one worker, which is on this host or on another host. Thread-safe.
class ModelView {
 public:
  virtual ~ModelView() = default;
  // Returns true if the models are on this host and can be read without waiting.
  virtual bool IsHere() const = 0;
  // Returns true if the process that saved the models is still running, as far as this is known
  // without a wait.
  virtual bool OwnerLives() const = 0;
  virtual Description Describe(const std::string& name) const = 0;
  // Copies the latest version into the blobs, and returns its number. If there is no version,
  // returns 0 and leaves the blobs unchanged. Throws ValueError if the layout or the sizes differ.
  // Throws CollectiveTimeoutError if the owner saves faster than this call can copy.
  virtual uint64_t Request(const std::string& name, const std::string& layout, const kf_blob* blobs,
                           size_t num_blobs) const = 0;
};

// Returns the number of bytes that the tensors use in a record, where each tensor begins on a cache
// line.
size_t PaddedBytes(const kf_blob* blobs, size_t num_blobs);
uint64_t TotalBytes(const kf_blob* blobs, size_t num_blobs);

// Access to the models of a worker on this host. The worker may be the calling process itself.
class StoreView final : public ModelView {
 public:
  // The caller still owns the descriptor. Throws InternalError if the descriptor doesn't refer to a
  // store of this version of the runtime. Set `own` if the store belongs to this process. The store
  // must then outlive the view, because the view uses the store's descriptor instead of a
  // duplicate.
  explicit StoreView(int fd, bool own = false);
  // Creates a view and closes the descriptor. Returns null if `fd` is -1.
  static std::shared_ptr<StoreView> Take(int fd);
  ~StoreView() override;
  StoreView(const StoreView&) = delete;
  StoreView& operator=(const StoreView&) = delete;

  bool IsHere() const override { return true; }
  bool OwnerLives() const override;
  Description Describe(const std::string& name) const override;
  uint64_t Request(const std::string& name, const std::string& layout, const kf_blob* blobs,
                   size_t num_blobs) const override;
  // Does the same as Request for a caller that doesn't know the sizes of the tensors. Copies all
  // `padded` bytes of the record, including the padding. `memory` returns the destination. It is
  // called only if the layout and the sizes match.
  uint64_t RequestPadded(const std::string& name, const std::string& layout, uint64_t bytes, uint64_t padded,
                         const std::function<char*()>& memory) const;

 private:
  struct Known {
    const Record* record;
    std::unique_ptr<Mapping> buffers[2];
  };
  const Known* Find(const std::string& name) const;
  const Known* Fitting(const std::string& name, const std::string& layout, uint64_t bytes, uint64_t padded) const;
  template <typename Copy>
  static uint64_t CopyWhole(const std::string& name, const Known& known, const Copy& copy);

  const bool own_;
  int fd_ = -1;
  std::unique_ptr<Mapping> head_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, Known> known_;  // guarded by mutex_; its elements are never moved or removed
};

}  // namespace kungfu::store

#endif  // KUNGFU_STORE_MODEL_STORE_H_
