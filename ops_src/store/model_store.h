// The memory in which a worker keeps its latest models, for the other workers of its host to read
// while it trains.
//
// Each worker has one such memory, anonymous like a segment. It alone writes there, and the memory
// outlives the cluster versions. The other workers get a descriptor that can only read. A *record*
// is what was saved under one name: its layout and two buffers, in which successive versions take
// turns. Neither side waits:
//
//   writer, version v into buffer v % 2          reader
//     begun[v % 2] = v                             v = latest (none: 0)
//     the words of the buffer                      the words of buffer v % 2
//     latest = v                                   begun[v % 2] == v? done : again
//
// Only the owner writes words, each with a release store. Readers use an acquire load (plain moves
// on x86).
//
// 1. A read is whole. The reader has read `latest == v`, so all words of version v were written
// before. The buffer is written again for version v + 2 only, and `begun` announces that first. So
// a reader that has seen one word of v + 2 also sees begun == v + 2 and begins again with the newer
// `latest`. For its copy it has the time of a whole save, and of all that the owner does between
// two saves (a training step). So repetitions are rare.
// Test: ModelStore.ReadsAreWholeWhileTheOwnerSavesWithoutPause
//
// 2. A writer may fail anywhere. While version v is being written `latest` is v - 1, whose buffer
// isn't touched any more. A record is counted in `records` after it is complete, and never moves or
// shrinks. A file that grew without a counted record has a hole that no reader looks at. A lock on
// the file, which the kernel drops when the owner ends, shows whether the owner lives.
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

// The owner's side. Thread-safe.
class ModelStore {
 public:
  ModelStore();
  ~ModelStore();
  ModelStore(const ModelStore&) = delete;
  ModelStore& operator=(const ModelStore&) = delete;

  // Opened for reading only; stays this object's.
  int fd() const { return read_fd_; }

  // Keeps a copy of the tensors as the next version of `name` and returns that version, from 1. Never waits for a
  // reader. Throws ValueError if `name` had another layout or other sizes before.
  uint64_t Save(const std::string& name, const std::string& layout, const kf_blob* blobs, size_t num_blobs);

 private:
  struct Own {
    Record* record;
    std::unique_ptr<Mapping> buffers[2];
  };
  Own& OwnRecord(const std::string& name, const std::string& layout, uint64_t bytes);

  const OneProcess process_;  // a forked child would write in its parent's name
  std::mutex mutex_;
  int fd_ = -1;
  int read_fd_ = -1;
  size_t end_ = 0;  // of the file; guarded by mutex_
  std::unique_ptr<Mapping> head_;
  std::map<std::string, Own> own_;  // guarded by mutex_
};

struct Description {
  std::string layout;
  uint64_t bytes = 0;    // of all tensors, without the padding between them
  uint64_t version = 0;  // latest; 0: there is no record of this name, or nothing in it yet
};

// Some worker's models, wherever it is. Thread-safe.
class ModelView {
 public:
  virtual ~ModelView() = default;
  // Whether a look at it costs no wait: it is on this host.
  virtual bool IsHere() const = 0;
  // Whether the process that saves there still runs, as far as is known without a wait.
  virtual bool OwnerLives() const = 0;
  virtual Description Describe(const std::string& name) const = 0;
  // Copies the latest version into the blobs and returns it; 0, with the blobs untouched, if there is none. Throws
  // ValueError if the layout or the sizes are others, CollectiveTimeoutError if the owner saves faster than this
  // can copy.
  virtual uint64_t Request(const std::string& name, const std::string& layout, const kf_blob* blobs,
                           size_t num_blobs) const = 0;
};

// How many bytes tensors take in a record, where each begins on a cache line.
size_t PaddedBytes(const kf_blob* blobs, size_t num_blobs);
uint64_t TotalBytes(const kf_blob* blobs, size_t num_blobs);

// Of another worker of this host, or one's own.
class StoreView final : public ModelView {
 public:
  // The descriptor stays the caller's. Throws InternalError if it isn't a store of this version of the runtime.
  // With `own` it is a store of this process, which has to outlive the view: no descriptor of it may be closed.
  explicit StoreView(int fd, bool own = false);
  // The same of a descriptor that it closes. Null for -1.
  static std::shared_ptr<StoreView> Take(int fd);
  ~StoreView() override;
  StoreView(const StoreView&) = delete;
  StoreView& operator=(const StoreView&) = delete;

  bool IsHere() const override { return true; }
  bool OwnerLives() const override;
  Description Describe(const std::string& name) const override;
  uint64_t Request(const std::string& name, const std::string& layout, const kf_blob* blobs,
                   size_t num_blobs) const override;
  // The same for a caller that doesn't know how the `bytes` are divided into tensors: as they lie in the record,
  // `padded` bytes in all, into what `memory` returns, which is called when it is known that they fit.
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
  mutable std::map<std::string, Known> known_;  // guarded by mutex_; its elements never move or go
};

}  // namespace kungfu::store

#endif  // KUNGFU_STORE_MODEL_STORE_H_
