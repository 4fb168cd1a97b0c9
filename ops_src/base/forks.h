// Tells an object that it is a forked child's copy of its parent's.
#ifndef KUNGFU_BASE_FORKS_H_
#define KUNGFU_BASE_FORKS_H_

#include <atomic>
#include <cstdint>

namespace kungfu {

// A forked child has its parent's memory: it could publish in its parent's name, and take a lock that a thread holds
// which doesn't exist here. So whatever speaks for a process remembers in which it was made, and asks before it touches
// a lock. fork() counts, in the child, which makes asking a load and a comparison; children of vfork(), posix_spawn()
// and a bare clone() aren't counted, they run no code of ours.
class OneProcess {
 public:
  OneProcess() : made_in_(forks_.load(std::memory_order_relaxed)) {}
  // Whether this is the copy that a forked child has.
  bool IsCopy() const { return made_in_ != forks_.load(std::memory_order_relaxed); }
  // Throws ValueError in such a child: "a forked child is no member of the cluster: it can't `what`".
  void Refuse(const char* what) const {
    if (IsCopy()) Throw(what);
  }

  static void CountFork() { forks_.fetch_add(1, std::memory_order_relaxed); }  // of fork() alone

 private:
  [[noreturn]] static void Throw(const char* what);

  static std::atomic<uint32_t> forks_;
  const uint32_t made_in_;
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_FORKS_H_
