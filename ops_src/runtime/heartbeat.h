// Notifies the launcher that this process runs, whatever its other threads are doing.
#ifndef KUNGFU_RUNTIME_HEARTBEAT_H_
#define KUNGFU_RUNTIME_HEARTBEAT_H_

#include <memory>
#include <optional>

#include "base/forks.h"
#include "collectives/communicator.h"

namespace kungfu {

// A thread that calls Communicator::Beat ten times a second. If the process is stopped, or the kernel doesn't schedule
// it, the heartbeats stop. They continue while the process compiles or evaluates for minutes.
//
// Not thread-safe. A forked child has no such thread. Its communicator of one rank needs none. If the child becomes a
// member later, it gets its own thread.
class Heartbeat {
 public:
  ~Heartbeat();
  // Sends heartbeats for this communicator from now on.
  void Follow(std::shared_ptr<Communicator> communicator);

 private:
  struct Shared;
  // Shared with the thread, which is never joined, because a process may end or fork at any time.
  std::shared_ptr<Shared> shared_;
  std::optional<OneProcess> process_;  // the process in which the thread runs
};

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_HEARTBEAT_H_
