// A shared library that is opened at run time and may be missing, for example OpenSSL or a device
// vendor's library.
#ifndef KUNGFU_BASE_LIBRARY_H_
#define KUNGFU_BASE_LIBRARY_H_

#include <string>
#include <vector>

namespace kungfu {

// The library stays open until the process ends. Closing it would be unsafe, because threads and
// contexts that the library has started still use its code.
class Library {
 public:
  // `what` is the library's name in messages ("the CUDA runtime"). `paths` lists the paths to try,
  // in order and separated by colons. If `paths` is empty, the constructor first looks for a
  // library that the process has already loaded under one of `names`. Then it lets the loader
  // search for `names`. Throws Error KF_MISSING if no library can be opened.
  Library(const std::string& what, const char* paths, const std::vector<std::string>& names);

  // The address of a function. It converts to any type of function pointer.
  struct Symbol {
    void* address;
    template <typename Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };
  // Throws Error KF_MISSING if the library doesn't have the function.
  Symbol Find(const std::string& name) const;
  // Returns null if the library doesn't have the function.
  Symbol FindOptional(const std::string& name) const;
  const std::string& path() const { return path_; }

 private:
  std::string what_;
  std::string path_;
  void* handle_ = nullptr;  // never closed
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_LIBRARY_H_
