// Tells the launcher that this process runs, whatever its other threads are busy with.
#ifndef KUNGFU_RUNTIME_HEARTBEAT_H_
#define KUNGFU_RUNTIME_HEARTBEAT_H_

#include <memory>
#include <optional>

#include "base/forks.h"
#include "collectives/communicator.h"

namespace kungfu {

// A thread that calls Communicator::Beat ten times a second. A process that is stopped, or that the kernel doesn't let
// run, beats no more; one that compiles or evaluates for minutes does.
//
// Used from one thread at a time. A forked child has no such thread; its communicator of one needs none, and should it
// become a member by itself it gets another.
class Heartbeat {
 public:
  ~Heartbeat();
  // Beats for this communicator from now on.
  void Follow(std::shared_ptr<Communicator> communicator);

 private:
  struct Shared;
  // The thread's, too: it is never joined, because a process may end, or fork, at any time.
  std::shared_ptr<Shared> shared_;
  std::optional<OneProcess> process_;  // the process of the thread
};

}  // namespace kungfu

#endif  // KUNGFU_RUNTIME_HEARTBEAT_H_
