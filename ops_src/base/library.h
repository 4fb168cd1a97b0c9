// A shared library that may be missing, opened at run time: a vendor's, OpenSSL.
#ifndef KUNGFU_BASE_LIBRARY_H_
#define KUNGFU_BASE_LIBRARY_H_

#include <string>
#include <vector>

namespace kungfu {

// Stays open for the life of the process: what it has started (threads, contexts) can't be unloaded safely.
class Library {
 public:
  // `what` names it in messages ("the CUDA runtime"). `paths`, separated by colons, are tried in their order; without
  // them, what this process has loaded already under one of `names`, then what the loader finds. Throws Error
  // KF_MISSING.
  Library(const std::string& what, const char* paths, const std::vector<std::string>& names);

  // A function, of whatever type it is assigned to.
  struct Symbol {
    void* address;
    template <typename Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };
  // Throws Error KF_MISSING: the library is there but another than expected.
  Symbol Find(const std::string& name) const;
  // Null if the library hasn't got it.
  Symbol FindOptional(const std::string& name) const;
  const std::string& path() const { return path_; }

 private:
  std::string what_;
  std::string path_;
  void* handle_ = nullptr;  // never closed
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_LIBRARY_H_
