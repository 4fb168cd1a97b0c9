#include "base/library.h"

#include <dlfcn.h>

#include <sstream>

#include "base/error.h"

namespace kungfu {

Library::Library(const std::string& what, const char* paths, const std::vector<std::string>& names) : what_(what) {
  std::string tried;
  const auto open = [&](const std::string& path, int flags) {
    if (handle_ != nullptr) return;
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
    if (handle_ != nullptr) {
      path_ = path;
      return;
    }
    const char* error = dlerror();
    if ((flags & RTLD_NOLOAD) == 0) tried += Text(tried.empty() ? "" : "; ", error != nullptr ? error : path.c_str());
  };
  if (paths != nullptr && paths[0] != '\0') {
    std::istringstream list(paths);
    for (std::string path; std::getline(list, path, ':');) {
      if (!path.empty()) open(path, 0);
    }
  } else {
    for (const std::string& name : names) open(name, RTLD_NOLOAD);
    for (const std::string& name : names) open(name, 0);
  }
  if (handle_ == nullptr) throw Error(KF_MISSING, Text(what_, " is missing: ", tried));
}

Library::Symbol Library::Find(const std::string& name) const {
  const Symbol symbol = FindOptional(name);
  if (symbol.address != nullptr) return symbol;
  throw Error(KF_MISSING, Text(what_, " in ", path_, " has no function ", name,
                               "; the file is another version or another library"));
}

Library::Symbol Library::FindOptional(const std::string& name) const { return {dlsym(handle_, name.c_str())}; }

}  // namespace kungfu
