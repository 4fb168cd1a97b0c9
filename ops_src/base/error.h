// The exceptions of the runtime. Each one contains a status of the C ABI.
#ifndef KUNGFU_BASE_ERROR_H_
#define KUNGFU_BASE_ERROR_H_

#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

#include "kungfu/c_api.h"

namespace kungfu {

// Returns the name of the Python exception that corresponds to `status`.
const char* StatusName(kf_status status);

class KF_API Error : public std::runtime_error {
 public:
  Error(kf_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  kf_status status() const { return status_; }
  // Returns the exception's name and message, for example "PeerLostError: rank 2 failed".
  std::string Described() const { return std::string(StatusName(status_)) + ": " + what(); }

 private:
  kf_status status_;
};

// Joins its arguments as text: Text("rank ", 2, " failed").
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Call this after a system call has failed. Returns an InternalError with `what` and the
// description of `errno`.
Error SystemError(const std::string& what);

// Copies as much of `text` as fits into a field of fixed size, and adds a NUL.
template <size_t kSize>
void CopyText(char (&field)[kSize], const std::string& text) {
  const size_t n = text.copy(field, kSize - 1);
  field[n] = '\0';
}
// Returns the text in a field of fixed size. Another process may have written the field, so the NUL
// may be missing.
template <size_t kSize>
std::string TextOf(const char (&field)[kSize]) {
  return {field, strnlen(field, kSize)};
}

// Throws an InternalError if `condition` is false. The other arguments form the message.
#define KUNGFU_CHECK(condition, ...)                                                                                  \
  do {                                                                                                                \
    if (!(condition))                                                                                                 \
      throw ::kungfu::Error(KF_INTERNAL, ::kungfu::Text(__FILE__, ":", __LINE__, ": " #condition ": ", __VA_ARGS__)); \
  } while (false)

}  // namespace kungfu

#endif  // KUNGFU_BASE_ERROR_H_
