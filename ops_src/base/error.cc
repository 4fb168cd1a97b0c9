#include "base/error.h"

#include <cerrno>
#include <cstring>
#include <iterator>

namespace kungfu {

namespace {

constexpr const char* kNames[] = {
    "OK",
    "ValueError",
    "TypeError",
    "CollectiveMismatchError",
    "PeerLostError",
    "CollectiveTimeoutError",
    "StaleClusterError",
    "CollectiveAbortedError",
    "ResizeError",
    "InternalError",
    "ImportError",
    "DeviceError",
};
static_assert(std::size(kNames) == KF_DEVICE + 1);

}  // namespace

const char* StatusName(kf_status status) { return kNames[status]; }

Error SystemError(const std::string& what) { return Error(KF_INTERNAL, Text(what, ": ", std::strerror(errno))); }

}  // namespace kungfu
