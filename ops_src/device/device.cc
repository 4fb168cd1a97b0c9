#include "device/device.h"

#include <algorithm>
#include <utility>

#include "base/hash.h"
#include "base/threads.h"
#include "collectives/dtype.h"

namespace kungfu::device {

Device::Device(Driver& driver, Engine* engine, std::string why_no_engine, const Options& options)
    : tools_{driver,
             engine,
             std::move(why_no_engine),
             options,
             [this](const JobPtr& job, const Error* error, uint32_t members) { End(job, error, members); },
             [this](const std::string& text) {
               std::lock_guard<std::mutex> guard(mutex_);
               engine_in_use_ = text;
             },
             /*stream=*/nullptr,
             /*staging=*/nullptr} {}

Device::~Device() {
  std::thread thread;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
    thread = std::move(thread_);
    queued_.notify_all();
  }
  if (thread.joinable()) thread.join();
}

uint64_t Device::Start(std::shared_ptr<Communicator> communicator, const Operation& operation, Stream stream) {
  Validate(operation, communicator->size());
  RequireMemory(operation, /*inputs=*/true, /*outputs=*/true);
  if (communicator->size() == 1 && tools_.options.engine != KF_ENGINE_VENDOR) {
    RunAlone(operation, stream);
    return 0;
  }
  auto job = std::make_shared<Job>();
  job->communicator = std::move(communicator);
  job->Keep(operation);
  job->key = Fnv1a(job->name.data(), job->name.size());
  job->signature = SignatureOf(job->operation);
  const Place here = tools_.driver.Here();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!place_) place_ = here;
    if (place_->device != here.device) {
      throw Error(KF_INVALID,
                  Text(NameOf(operation.kind), " \"", operation.name, "\": the current device of this thread is ",
                       here.device, ", but this process uses device ", place_->device));
    }
  }
  job->ready = Mark(tools_.driver, stream);
  EnsureThread(here);
  return Enqueue(std::move(job));
}

// Copies each operation's inputs to its outputs, like the communicator of a single rank.
void Device::RunAlone(const Operation& operation, Stream stream) {
  for (size_t i = 0; i < operation.num_tensors; i++) {
    const kf_tensor& tensor = operation.tensors[i];
    if (tensor.count == 0 || tensor.input == tensor.output) continue;
    tools_.driver.Copy(tensor.output, tensor.input, tensor.count * SizeOf(operation.dtype), KF_DEVICE_TO_DEVICE,
                       stream);
  }
}

uint64_t Device::Enqueue(JobPtr job) {
  std::lock_guard<std::mutex> guard(mutex_);
  // Drop ended operations with the same name. These operations belong to a failed step, so no
  // caller waits for them any more.
  for (auto each = by_ticket_.begin(); each != by_ticket_.end();) {
    each = each->second->ended && each->second->key == job->key ? by_ticket_.erase(each) : std::next(each);
  }
  if (by_ticket_.size() >= Session::kMostReady || queue_.size() >= Session::kMostReady) {
    throw Error(KF_INVALID, Text("too many device operations: at most ", Session::kMostReady,
                                 " may be queued or running; wait for one first"));
  }
  if (sequence_of_.lock() != job->communicator) {
    sequence_.clear();
    sequence_of_ = job->communicator;
  }
  job->sequence = sequence_[job->key]++;
  job->waited = RunTime();
  const uint64_t ticket = ++last_ticket_;
  by_ticket_.emplace(ticket, job);
  queue_.push_back(std::move(job));
  queued_.notify_all();
  return ticket;
}

void Device::Wait(const uint64_t* tickets, size_t num_tickets) {
  std::vector<JobPtr> jobs;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (size_t i = 0; i < num_tickets; i++) {
      if (tickets[i] == 0) continue;
      const auto found = by_ticket_.find(tickets[i]);
      if (found == by_ticket_.end()) throw Error(KF_INVALID, Text("no started operation has ticket ", tickets[i]));
      jobs.push_back(found->second);
      by_ticket_.erase(found);
    }
  }
  for (;;) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (const JobPtr& job : jobs) ended_.wait(lock, [&] { return job->ended; });
    uint32_t fewest = UINT32_MAX;
    for (const JobPtr& job : jobs) {
      if (job->error) throw *job->error;
      fewest = std::min(fewest, job->members);
    }
    // If the numbers in `members` differ, a rank failed between two operations, and contributed
    // only to the earlier ones. Repeat the earlier operations without that rank. The other
    // survivors have the same numbers, so they do the same.
    std::vector<JobPtr> again;
    for (const JobPtr& job : jobs) {
      if (job->members == fewest) continue;
      if (!Reduces(job->operation.kind)) continue;
      job->ended = false;
      job->by_staging = true;
      again.push_back(job);
    }
    if (again.empty()) return;
    lock.unlock();
    for (const JobPtr& job : again) {
      const uint64_t ticket = Enqueue(job);
      lock.lock();
      by_ticket_.erase(ticket);
      lock.unlock();
    }
  }
}

std::string Device::EngineInUse() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return engine_in_use_;
}

void Device::EnsureThread(const Place& place) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (stopping_) throw Error(KF_ABORTED, "the device has been closed");
  if (thread_.joinable()) return;
  thread_ = StartThread("kungfu-device", [this, place] { Loop(place); });
}

void Device::Loop(Place place) {
  std::optional<Session> session;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    queued_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) break;
    // Run only operations of one communicator. Operations of an older communicator fail
    // immediately, so they don't delay the others.
    const auto communicator = queue_.front()->communicator;
    std::vector<JobPtr> mine;
    for (const JobPtr& job : queue_) {
      if (job->communicator == communicator) mine.push_back(job);
    }
    lock.unlock();
    try {
      if (tools_.stream == nullptr) {
        tools_.driver.Enter(place);
        tools_.stream = tools_.driver.NewStream();
        tools_.staging = std::make_unique<Staging>(tools_.driver, tools_.options.chunk_bytes);
      }
      if (!session || session->communicator() != communicator) session.emplace(tools_, communicator);
      if (!session->RunCycle(mine)) AwaitMore();
    } catch (const std::exception& thrown) {
      const auto* typed = dynamic_cast<const Error*>(&thrown);
      const Error error = typed != nullptr ? *typed : Error(KF_INTERNAL, thrown.what());
      if (session) session->GiveUp(mine);
      for (const JobPtr& job : mine) End(job, &error, 0);
    }
    lock.lock();
  }
  const Error closed(KF_ABORTED, "the device has been closed");
  const std::vector<JobPtr> left(queue_.begin(), queue_.end());
  lock.unlock();
  for (const JobPtr& job : left) End(job, &closed, 0);
  session.reset();
  tools_.staging.reset();
  if (tools_.stream != nullptr) {
    try {
      tools_.driver.Delete(tools_.stream);
    } catch (const Error&) {  // the device has failed, and the stream no longer exists
    }
  }
}

void Device::End(const JobPtr& job, const Error* error, uint32_t members) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (job->ended) return;
  job->ended = true;
  job->members = members;
  if (error != nullptr) job->error = *error;
  if (error != nullptr || job->kept == nullptr) job->ready = Mark();
  const auto found = std::find(queue_.begin(), queue_.end(), job);
  if (found != queue_.end()) queue_.erase(found);
  ended_.notify_all();
}

// Called if no operation is ready on all ranks. Waits at most 1 ms until this rank has more
// operations. By then, another rank may have added one.
void Device::AwaitMore() {
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t before = queue_.size();
  queued_.wait_for(lock, std::chrono::milliseconds(1), [&] { return stopping_ || queue_.size() > before; });
}

}  // namespace kungfu::device
