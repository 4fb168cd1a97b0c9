#include "store/model_store.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"
#include "base/memory.h"

namespace kungfu::store {

struct alignas(64) Record {
  char name[kNameBytes];
  char layout[kLayoutBytes];
  uint64_t bytes;      // number of bytes without padding
  uint64_t capacity;   // number of bytes in each buffer
  uint64_t offset[2];  // offset of each buffer in the file
  alignas(64) std::atomic<uint64_t> latest;
  std::atomic<uint64_t> begun[2];
};

struct Header {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t record_bytes;
  alignas(64) std::atomic<uint32_t> records;  // number of complete records
  Record record[kRecords];
};

namespace {

constexpr uint64_t kMagic = 0x6b756e6766755354;  // "kungfuST"
constexpr uint32_t kLayoutVersion = 1;
constexpr size_t kPage = 4096;
constexpr size_t kWord = sizeof(uint64_t);
constexpr int kAttempts = 1000;

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == kWord);

void Publish(std::atomic<uint64_t>* to, const char* from, size_t bytes) {
  for (; bytes >= kWord; bytes -= kWord, from += kWord, to++) {
    uint64_t word;
    std::memcpy(&word, from, kWord);
    to->store(word, std::memory_order_release);
  }
  if (bytes > 0) {
    uint64_t word = 0;
    std::memcpy(&word, from, bytes);
    to->store(word, std::memory_order_release);
  }
}

void Collect(char* to, const std::atomic<uint64_t>* from, size_t bytes) {
  for (; bytes >= kWord; bytes -= kWord, to += kWord, from++) {
    const uint64_t word = from->load(std::memory_order_acquire);
    std::memcpy(to, &word, kWord);
  }
  if (bytes > 0) {
    const uint64_t word = from->load(std::memory_order_acquire);
    std::memcpy(to, &word, bytes);
  }
}

std::atomic<uint64_t>* Words(char* at) { return reinterpret_cast<std::atomic<uint64_t>*>(at); }

// Maps `bytes` bytes of a store, beginning at `offset`.
std::unique_ptr<Mapping> Map(int fd, size_t offset, size_t bytes, bool writable) {
  return std::make_unique<Mapping>(fd, offset, bytes, writable, Text(bytes, " bytes of a model store"));
}

// Returns a lock on the whole file, for fcntl.
struct flock Whole(short type) {
  struct flock whole{};
  whole.l_type = type;
  whole.l_whence = SEEK_SET;
  return whole;
}

Header& HeaderOf(const Mapping& head) { return *reinterpret_cast<Header*>(head.data()); }

std::string Described(const std::string& layout, uint64_t bytes) { return Text(layout, " (", bytes, " bytes)"); }

}  // namespace

size_t PaddedBytes(const kf_blob* blobs, size_t num_blobs) {
  size_t bytes = 0;
  for (size_t i = 0; i < num_blobs; i++) bytes += RoundUp(blobs[i].nbytes, kAlign);
  return bytes;
}

uint64_t TotalBytes(const kf_blob* blobs, size_t num_blobs) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < num_blobs; i++) bytes += blobs[i].nbytes;
  return bytes;
}

ModelStore::ModelStore() {
  try {
    fd_ = memfd_create("kungfu-store", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0) throw SystemError("memfd_create");
    end_ = RoundUp(sizeof(Header), kPage);
    if (ftruncate(fd_, static_cast<off_t>(end_)) != 0) throw SystemError("allocating shared memory for a model store");
    // The file may grow, but no process can shrink it. A read beyond a shrunken end would raise
    // SIGBUS.
    fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK);
    head_ = Map(fd_, 0, end_, /*writable=*/true);
    auto* header = new (head_->data()) Header{};
    header->layout_version = kLayoutVersion;
    header->record_bytes = sizeof(Record);
    header->magic = kMagic;
    // The lock belongs to the process and not to the descriptor, which other processes will also
    // hold. The kernel drops the lock if this process closes any descriptor of the file. So both
    // descriptors stay open until this object is destroyed.
    struct flock whole = Whole(F_WRLCK);
    if (fcntl(fd_, F_SETLK, &whole) != 0) throw SystemError("fcntl(F_SETLK) on a model store");
    read_fd_ = open(Text("/proc/self/fd/", fd_).c_str(), O_RDONLY | O_CLOEXEC);
    if (read_fd_ < 0) throw SystemError("opening a model store for reading");
  } catch (...) {
    if (fd_ >= 0) close(fd_);
    throw;
  }
}

ModelStore::~ModelStore() {
  close(read_fd_);
  close(fd_);
}

ModelStore::Own& ModelStore::OwnRecord(const std::string& name, const std::string& layout, uint64_t bytes) {
  const auto found = own_.find(name);
  if (found != own_.end()) {
    const Record& record = *found->second.record;
    if (layout != record.layout || bytes != record.bytes) {
      throw Error(KF_INVALID,
                  Text("save \"", name, "\": the layout is ", Described(layout, bytes), ", but was ",
                       Described(record.layout, record.bytes), " before; use another name for another layout"));
    }
    return found->second;
  }
  if (name.empty() || name.size() >= kNameBytes) {
    throw Error(KF_INVALID,
                Text("save \"", name, "\": the name has ", name.size(), " bytes; it must have 1 to ", kNameBytes - 1));
  }
  if (layout.size() >= kLayoutBytes) {
    throw Error(KF_INVALID,
                Text("save \"", name, "\": the layout has ", layout.size(), " bytes; at most ", kLayoutBytes - 1));
  }
  Header& header = HeaderOf(*head_);
  const uint32_t index = header.records.load(std::memory_order_relaxed);
  if (index == kRecords)
    throw Error(KF_INVALID,
                Text("save \"", name, "\": this worker has saved ", kRecords, " other names, which is the limit"));
  Record& record = header.record[index];
  CopyText(record.name, name);
  CopyText(record.layout, layout);
  record.bytes = bytes;
  return own_.emplace(name, Own{&record, {}}).first->second;
}

uint64_t ModelStore::Save(const std::string& name, const std::string& layout, const kf_blob* blobs, size_t num_blobs) {
  process_.Refuse("save models");
  std::lock_guard<std::mutex> guard(mutex_);
  Own& own = OwnRecord(name, layout, TotalBytes(blobs, num_blobs));
  Record& record = *own.record;
  if (own.buffers[0] == nullptr) {
    try {
      record.capacity = RoundUp(std::max<size_t>(PaddedBytes(blobs, num_blobs), 1), kPage);
      for (int i = 0; i < 2; i++) {
        record.offset[i] = end_;
        // Allocate the memory now, because a write without memory would raise SIGBUS later.
        const int error = posix_fallocate(fd_, static_cast<off_t>(end_), static_cast<off_t>(record.capacity));
        if (error != 0) {
          throw Error(KF_INTERNAL, Text("can't allocate ", record.capacity, " bytes of shared memory for \"", name,
                                        "\": ", std::strerror(error)));
        }
        own.buffers[i] = Map(fd_, end_, record.capacity, /*writable=*/true);
        end_ += record.capacity;
      }
    } catch (...) {
      own_.erase(name);
      throw;
    }
    HeaderOf(*head_).records.fetch_add(1, std::memory_order_release);
  } else if (PaddedBytes(blobs, num_blobs) > record.capacity) {
    throw Error(KF_INVALID, Text("save \"", name, "\": the sizes of the tensors have changed since the first save"));
  }
  const uint64_t version = record.latest.load(std::memory_order_relaxed) + 1;
  record.begun[version % 2].store(version, std::memory_order_release);
  char* at = own.buffers[version % 2]->data();
  for (size_t i = 0; i < num_blobs; i++) {
    Publish(Words(at), static_cast<const char*>(blobs[i].data), blobs[i].nbytes);
    at += RoundUp(blobs[i].nbytes, kAlign);
  }
  record.latest.store(version, std::memory_order_release);
  return version;
}

StoreView::StoreView(int fd, bool own) : own_(own) {
  const size_t bytes = FileSize(fd, "a model store");
  if (bytes < sizeof(Header))
    throw Error(KF_INTERNAL, Text("a model store has only ", bytes, " bytes, less than its header"));
  head_ = Map(fd, 0, sizeof(Header), /*writable=*/false);
  const Header& header = HeaderOf(*head_);
  if (header.magic != kMagic || header.layout_version != kLayoutVersion || header.record_bytes != sizeof(Record)) {
    throw Error(KF_INTERNAL, Text("not a model store of this version of the runtime (magic ", header.magic, ", layout ",
                                  header.layout_version, ")"));
  }
  fd_ = own_ ? fd : fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (fd_ < 0) throw SystemError("duplicating a model store's descriptor");
}

std::shared_ptr<StoreView> StoreView::Take(int fd) {
  if (fd < 0) return nullptr;
  std::shared_ptr<StoreView> view;
  try {
    view = std::make_shared<StoreView>(fd);
  } catch (...) {
    close(fd);
    throw;
  }
  close(fd);
  return view;
}

StoreView::~StoreView() {
  if (!own_) close(fd_);
}

bool StoreView::OwnerLives() const {
  if (own_) return true;
  struct flock whole = Whole(F_RDLCK);
  if (fcntl(fd_, F_GETLK, &whole) != 0) throw SystemError("fcntl(F_GETLK) on a model store");
  return whole.l_type != F_UNLCK;
}

const StoreView::Known* StoreView::Find(const std::string& name) const {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = known_.find(name);
  if (found != known_.end()) return &found->second;
  const Header& header = HeaderOf(*head_);
  const uint32_t records = header.records.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < records && i < kRecords; i++) {
    const Record& record = header.record[i];
    if (TextOf(record.name) != name) continue;
    const size_t size = FileSize(fd_, "a model store");
    Known known{&record, {}};
    for (int b = 0; b < 2; b++) {
      const bool inside = record.capacity <= size && record.offset[b] <= size - record.capacity;
      if (!inside || record.offset[b] % kPage != 0) {
        throw Error(KF_INTERNAL, Text("record \"", name, "\" exceeds its model store: ", record.capacity,
                                      " bytes at offset ", record.offset[b], " of ", size, " bytes"));
      }
      known.buffers[b] = Map(fd_, record.offset[b], record.capacity, /*writable=*/false);
    }
    return &known_.emplace(name, std::move(known)).first->second;
  }
  return nullptr;
}

Description StoreView::Describe(const std::string& name) const {
  const Known* known = Find(name);
  if (known == nullptr) return {};
  return {TextOf(known->record->layout), known->record->bytes, known->record->latest.load(std::memory_order_acquire)};
}

// Returns null if nothing has been saved under this name. Throws if the saved model has a different
// layout.
const StoreView::Known* StoreView::Fitting(const std::string& name, const std::string& layout, uint64_t bytes,
                                           uint64_t padded) const {
  const Known* known = Find(name);
  if (known == nullptr) return nullptr;
  const Record& record = *known->record;
  if (TextOf(record.layout) != layout || record.bytes != bytes || padded > record.capacity) {
    throw Error(KF_INVALID, Text("request \"", name, "\": the request is for ", Described(layout, bytes), ", but ",
                                 Described(TextOf(record.layout), record.bytes), " is saved"));
  }
  return known;
}

// Repeats the copy until the whole copy belongs to one version. Returns that version, or 0 if there
// is no version.
template <typename Copy>
uint64_t StoreView::CopyWhole(const std::string& name, const Known& known, const Copy& copy) {
  const Record& record = *known.record;
  for (int attempt = 0; attempt < kAttempts; attempt++) {
    const uint64_t version = record.latest.load(std::memory_order_acquire);
    if (version == 0) return 0;
    copy(Words(known.buffers[version % 2]->data()));
    if (record.begun[version % 2].load(std::memory_order_acquire) == version) return version;
    sched_yield();
  }
  throw Error(KF_TIMEOUT, Text("request \"", name, "\": the owner saves faster than ", record.bytes,
                               " bytes can be copied (", kAttempts, " attempts)"));
}

uint64_t StoreView::Request(const std::string& name, const std::string& layout, const kf_blob* blobs,
                            size_t num_blobs) const {
  const Known* known = Fitting(name, layout, TotalBytes(blobs, num_blobs), PaddedBytes(blobs, num_blobs));
  if (known == nullptr) return 0;
  return CopyWhole(name, *known, [&](const std::atomic<uint64_t>* at) {
    for (size_t i = 0; i < num_blobs; i++) {
      Collect(static_cast<char*>(blobs[i].data), at, blobs[i].nbytes);
      at += RoundUp(blobs[i].nbytes, kAlign) / kWord;
    }
  });
}

uint64_t StoreView::RequestPadded(const std::string& name, const std::string& layout, uint64_t bytes, uint64_t padded,
                                  const std::function<char*()>& memory) const {
  const Known* known = Fitting(name, layout, bytes, padded);
  if (known == nullptr) return 0;
  char* const to = memory();
  return CopyWhole(name, *known, [&](const std::atomic<uint64_t>* at) { Collect(to, at, padded); });
}

}  // namespace kungfu::store
