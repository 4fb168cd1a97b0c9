// Notifies the launcher that this process is running, even if the process's other threads are busy.
#ifndef KUNGFU_RUNTIME_HEARTBEAT_H_
#define KUNGFU_RUNTIME_HEARTBEAT_H_

#include <memory>
#include <optional>

#include "base/forks.h"
#include "collectives/communicator.h"

namespace kungfu {

// A thread that calls Communicator::Beat ten times per second. The heartbeats stop if the process
// is stopped or if the kernel doesn't schedule it. They continue while the process compiles or
// evaluates for minutes.
//
// Not thread-safe. A forked child has no such thread, and needs none for its communicator of one
// rank. If the child becomes a member of a cluster later, it gets its own thread.
class Heartbeat {
 public:
  ~Heartbeat();
  // From now on, sends heartbeats for this communicator.
  void Follow(std::shared_ptr<Communicator> communicator);

 private:
  struct Shared;
  // The state that this object shares with its thread. The thread is never joined, because the
  // process may end or fork at any time.
  std::shared_ptr<Shared> shared_;
  std::optional<OneProcess> process_;  // the process in which the thread is running
};

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_HEARTBEAT_H_
