// Detects whether an object is a copy that fork() made in a child process.
#ifndef KUNGFU_BASE_FORKS_H_
#define KUNGFU_BASE_FORKS_H_

#include <atomic>
#include <cstdint>

namespace kungfu {

// Remembers the process that created an object. A forked child has a copy of its parent's memory.
// Without this check, the child could publish data in its parent's name. The child could also wait
// for a lock forever, because the thread that holds the lock exists only in the parent. So each
// object that acts for a process calls `IsCopy` or `Refuse` before it takes a lock.
//
// fork() increments a counter in the child, so a check is one load and one comparison. Children of
// vfork(), posix_spawn() and a bare clone() aren't counted, because they run none of the runtime's
// code.
class OneProcess {
 public:
  OneProcess() : made_in_(forks_.load(std::memory_order_relaxed)) {}
  // Returns true if this object is a forked child's copy.
  bool IsCopy() const { return made_in_ != forks_.load(std::memory_order_relaxed); }
  // Throws ValueError in a forked child: "a forked child is not a member of the cluster and can't `what`".
  void Refuse(const char* what) const {
    if (IsCopy()) Throw(what);
  }

  static void CountFork() { forks_.fetch_add(1, std::memory_order_relaxed); }  // only fork() calls it

 private:
  [[noreturn]] static void Throw(const char* what);

  static std::atomic<uint32_t> forks_;
  const uint32_t made_in_;
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_FORKS_H_
