#include "runtime/background.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "base/threads.h"
#include "collectives/dtype.h"
#include "collectives/operation_span.h"
#include "collectives/traffic.h"

namespace kungfu {
namespace {

std::atomic<uint32_t> delay_ms{0};

}  // namespace

// An operation and its memory. It has four owners one after another: the thread that starts it, the
// queue, the background thread, and the waiting thread. Each change of owner happens under the
// mutex.
struct Background::Pending : KeptOperation {
  enum class State { kQueued, kRunning, kEnded };

  // Copies the inputs of `asked` into memory of this object.
  void Copy(const Operation& asked) {
    Keep(asked);
    const size_t unit = SizeOf(asked.dtype);
    bytes = 0;
    for (const kf_tensor& tensor : tensors) bytes += Aligned(tensor.count * unit);
    char* at = inputs.Get(bytes);
    for (kf_tensor& tensor : tensors) {
      const size_t n = tensor.count * unit;
      if (n > 0) std::memcpy(at, tensor.input, n);
      tensor.input = at;
      tensor.output = nullptr;
      at += Aligned(n);
    }
  }

  void Run() noexcept {
    try {
      if (!to_outputs) {
        char* at = ResultsOrGiveUp();
        for (kf_tensor& tensor : tensors) {
          tensor.output = at;
          at += Aligned(tensor.count * SizeOf(operation.dtype));
        }
      }
      DelayForTests();
      const uint64_t began = Ticks();
      generation = communicator->Run(operation);
      Traffic::Get().CountHidden(began);
    } catch (const Error& thrown) {
      error = thrown;
    } catch (const std::exception& thrown) {
      error = Error(KF_INTERNAL, thrown.what());
    }
    ran_on = communicator;
    communicator.reset();  // this object may be kept so that its memory can be reused, but must not keep the
                           // communicator's segment
  }

  char* ResultsOrGiveUp() {
    try {
      return results.Get(bytes);
    } catch (const Error& no_memory) {
      communicator->GiveUp(no_memory);  // the other ranks are waiting for this rank's contribution
      throw;
    }
  }

  void CheckOutputs(const kf_started& started) const {
    bool equal = started.num_tensors == tensors.size();
    for (size_t i = 0; equal && i < tensors.size(); i++) {
      equal = started.tensors[i].count == tensors[i].count &&
              (started.tensors[i].output != nullptr || tensors[i].count == 0);
    }
    if (!equal)
      throw Error(KF_INVALID,
                  Text("all_reduce \"", name, "\": the tensors passed to wait differ from those passed to start"));
  }

  void CopyOut(const kf_started& started) const {
    const TraceSpan span(Trace::What::kCopy, "copy out", CountOf(operation) * SizeOf(operation.dtype));
    for (size_t i = 0; i < tensors.size(); i++) {
      const size_t n = tensors[i].count * SizeOf(operation.dtype);
      if (n > 0) std::memcpy(started.tensors[i].output, tensors[i].output, n);
    }
  }

  std::shared_ptr<Communicator> communicator;  // set until the operation has run
  std::weak_ptr<Communicator> ran_on;
  Memory inputs, results;  // memory for the tensors; the results may go directly to the waiting caller's outputs
                           // instead
  size_t bytes = 0;        // size of `inputs` and of `results`
  std::optional<Error> error;
  uint32_t generation = 0;  // the generation in which the operation has ended

  State state = State::kQueued;  // guarded by mutex_
  bool waited_for = false;       // guarded by mutex_; true while a caller waits for it in Wait
  bool to_outputs = false;       // whether the results go to the waiting caller's outputs; set before the operation
                                 // runs
  uint64_t ticket = 0;
};

Background::~Background() { Stop(); }

uint64_t Background::Start(std::shared_ptr<Communicator> communicator, const Operation& operation) {
  KUNGFU_CHECK(operation.kind == Kind::kAllReduce, NameOf(operation.kind), " can't be started in the background");
  Validate(operation, communicator->size());
  RequireMemory(operation, /*inputs=*/true, /*outputs=*/false);  // the caller passes the outputs to `Wait`
  if (communicator->size() == 1) {
    communicator->Run(operation);
    return 0;
  }
  process_.Refuse("start collectives");
  const std::string key = Text(operation.name, '\0', int(operation.dtype));
  const PendingPtr pending = NewPending(key);
  if (Trace::On() && OperationSpan::IsOfGradients(operation)) Trace::ReductionBegins(Trace::Now());
  {
    const TraceSpan span(Trace::What::kCopy, "copy in", CountOf(operation) * SizeOf(operation.dtype));
    pending->Copy(operation);
  }
  pending->communicator = std::move(communicator);

  std::unique_lock<std::mutex> lock(mutex_);
  EnsureThread(lock);
  pending->ticket = ++last_ticket_;
  queue_.push_back(pending);
  by_ticket_[pending->ticket] = pending;
  by_key_[key] = pending;
  queued_.notify_one();
  return pending->ticket;
}

// Reuses the last operation with this name and dtype, and its memory, if no caller needs it any
// more. Otherwise returns a new operation. In both cases, the last operation's ticket becomes void.
Background::PendingPtr Background::NewPending(const std::string& key) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return std::make_shared<Pending>();
  PendingPtr last = std::move(found->second);
  by_key_.erase(found);
  by_ticket_.erase(last->ticket);
  if (last->state != Pending::State::kEnded || last->waited_for) return std::make_shared<Pending>();
  last->state = Pending::State::kQueued;
  last->error.reset();
  return last;
}

void Background::Wait(const kf_started* started, size_t num_started) {
  process_.Refuse("wait for collectives");
  std::vector<PendingPtr> all(num_started);
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (size_t i = 0; i < num_started; i++) {
      if (started[i].ticket == 0) continue;
      const auto found = by_ticket_.find(started[i].ticket);
      if (found == by_ticket_.end()) {
        throw Error(KF_INVALID,
                    Text("no operation has ticket ", started[i].ticket,
                         ": a caller has already waited for it, or a newer operation with its name was started"));
      }
      found->second->CheckOutputs(started[i]);
      all[i] = found->second;
    }
    for (size_t i = 0; i < num_started; i++) {
      if (all[i] == nullptr) continue;
      by_ticket_.erase(started[i].ticket);
      all[i]->waited_for = true;
      if (all[i]->state != Pending::State::kQueued) continue;
      for (size_t t = 0; t < started[i].num_tensors; t++) all[i]->tensors[t].output = started[i].tensors[t].output;
    }
  }
  std::optional<Error> error;
  {
    const TraceSpan span(Trace::What::kProgram, "wait for reductions");
    for (size_t i = 0; i < num_started; i++) {
      if (all[i] == nullptr) continue;
      // Wait for every operation, even after a failure, because the background thread may write to
      // an operation's outputs until the operation has ended.
      WaitFor(*all[i]);
      if (!error) error = all[i]->error;
    }
  }
  if (!error) error = Settle(all);
  for (size_t i = 0; i < num_started; i++) {
    if (all[i] != nullptr && !error && !all[i]->to_outputs) all[i]->CopyOut(started[i]);
  }
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (const PendingPtr& pending : all) {
      if (pending != nullptr) pending->waited_for = false;
    }
  }
  if (Trace::On()) Trace::ReductionEnds(Trace::Now());
  if (error) throw Error(*error);
}

// Repeats operations, so that all of them end in the same generation. All operations must have
// ended without an error. If a repetition fails, returns its error.
std::optional<Error> Background::Settle(const std::vector<PendingPtr>& all) {
  std::shared_ptr<Communicator> communicator;
  std::vector<Operation> operations;
  std::vector<uint32_t> generations;
  for (const PendingPtr& pending : all) {
    if (pending == nullptr) continue;
    const auto ran_on = pending->ran_on.lock();
    if (ran_on == nullptr || (communicator != nullptr && communicator != ran_on)) {
      return Error(KF_STALE, "the cluster has changed since the operations were started");
    }
    communicator = ran_on;
    operations.push_back(pending->operation);
    generations.push_back(pending->generation);
  }
  if (communicator == nullptr) return std::nullopt;
  try {
    communicator->Settle(operations.data(), generations.data(), operations.size());
  } catch (const Error& thrown) {
    return thrown;
  } catch (const std::exception& thrown) {
    return Error(KF_INTERNAL, thrown.what());
  }
  return std::nullopt;
}

void Background::WaitFor(Pending& pending) {
  const uint64_t began = Ticks();
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [&] { return pending.state == Pending::State::kEnded; });
  Traffic::Get().CountWait(began);
}

// Starts the thread if there is none. `lock` holds mutex_. If a call of Stop is in progress, the
// old thread must end first. Otherwise two threads would run operations out of order. Also, the old
// thread would never end if `stopping_` were reset.
void Background::EnsureThread(std::unique_lock<std::mutex>& lock) {
  stopped_.wait(lock, [this] { return !stopping_; });
  if (thread_ != nullptr) return;
  thread_ = std::make_unique<std::thread>(StartThread("kungfu-comm", [this] { Loop(); }));
}

void Background::Loop() {
  // Run on all of the process's cores. This thread inherits its cores from a thread of MindSpore,
  // which may be bound to one core.
  cpu_set_t cores;
  if (sched_getaffinity(getpid(), sizeof cores, &cores) == 0) sched_setaffinity(0, sizeof cores, &cores);

  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    queued_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    PendingPtr pending = std::move(queue_.front());
    queue_.pop_front();
    pending->state = Pending::State::kRunning;
    pending->to_outputs = pending->waited_for;
    lock.unlock();
    pending->Run();
    lock.lock();
    pending->state = Pending::State::kEnded;
    pending.reset();
    ended_.notify_all();
  }
}

void Background::Stop() noexcept {
  if (process_.IsCopy()) {
    // In a forked child, the lock on the shared state may still be held by a thread that exists
    // only in the parent.
    (void)thread_.release();
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  stopped_.wait(lock, [this] { return !stopping_; });  // another call of `Stop` may be running
  if (thread_ == nullptr) return;
  stopping_ = true;
  queued_.notify_all();
  const std::unique_ptr<std::thread> thread = std::move(thread_);
  lock.unlock();
  thread->join();
  lock.lock();
  stopping_ = false;
  stopped_.notify_all();
}

void SetDelayForTests(uint32_t milliseconds) { delay_ms.store(milliseconds, std::memory_order_relaxed); }

void DelayForTests() {
  const uint32_t delay = delay_ms.load(std::memory_order_relaxed);
  if (delay > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay));
}

}  // namespace kungfu
