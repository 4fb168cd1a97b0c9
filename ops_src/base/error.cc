#include "base/error.h"

namespace kungfu {

const char* StatusName(kf_status status) {
  switch (status) {
    case KF_OK:
      return "OK";
    case KF_INVALID:
      return "ValueError";
    case KF_TYPE:
      return "TypeError";
    case KF_MISMATCH:
      return "CollectiveMismatchError";
    case KF_PEER_LOST:
      return "PeerLostError";
    case KF_TIMEOUT:
      return "CollectiveTimeoutError";
    case KF_STALE:
      return "StaleClusterError";
    case KF_ABORTED:
      return "CollectiveAbortedError";
    case KF_RESIZE:
      return "ResizeError";
    case KF_INTERNAL:
      return "InternalError";
    case KF_MISSING:
      return "ImportError";
    case KF_DEVICE:
      return "DeviceError";
  }
  return "InternalError";
}

}  // namespace kungfu
