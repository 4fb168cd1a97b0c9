// Shared memory that processes map from anonymous files.
#ifndef KUNGFU_BASE_MAPPING_H_
#define KUNGFU_BASE_MAPPING_H_

#include <sys/mman.h>
#include <sys/stat.h>

#include <cstddef>
#include <string>

#include "base/error.h"

namespace kungfu {

inline size_t RoundUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Returns the file's size. `what` is the file's name in error messages.
inline size_t FileSize(int fd, const std::string& what) {
  struct stat info{};
  if (fstat(fd, &info) != 0) throw SystemError("fstat of " + what);
  return static_cast<size_t>(info.st_size);
}

// A memory mapping that is unmapped when the object is destroyed.
class Mapping {
 public:
  Mapping(int fd, size_t offset, size_t bytes, bool writable, const std::string& what) : bytes_(bytes) {
    void* map = mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED | MAP_NORESERVE, fd,
                     static_cast<off_t>(offset));
    if (map == MAP_FAILED) throw SystemError("mmap of " + what);
    data_ = static_cast<char*>(map);
  }
  ~Mapping() { munmap(data_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* data() const { return data_; }

 private:
  char* data_;
  size_t bytes_;
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_MAPPING_H_
