#include "simulated.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <thread>

namespace standin {
namespace {

using Clock = std::vector<uint64_t>;  // by the number of the stream

void Join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}
uint64_t At(const Clock& clock, size_t stream) { return stream < clock.size() ? clock[stream] : 0; }

struct Access {
  uintptr_t begin, end;
  size_t stream;
  uint64_t tick;
  bool writes;
};

struct Allocation {
  char* visible;  // what the caller has: out of reach for the host if it is a device's
  char* real;     // the same pages, for the streams
  size_t bytes, mapped;
  bool host;
  bool freed = false;
  int device;
  std::vector<Access> accesses;
};

struct EventState {
  bool recorded = false;
  bool done = false;
  Clock clock;
};

struct Work {
  std::function<void()> run;
  std::function<void()> interrupt;
  std::shared_ptr<EventState> marks;  // done when this is
  bool always = false;                // an aborted stream does it all the same
};

struct StreamState {
  size_t number;
  int device;
  bool destroyed = false;
  bool aborted = false;
  bool busy = false;
  Clock clock;
  uint64_t tick = 0;
  std::deque<Work> queue;
  std::function<void()> interrupt;  // of what runs now
  std::condition_variable changed;
};

size_t NumberFrom(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && text[0] != '\0' ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct Fault {
  std::string function;
  long calls_left;
  int code;
};

// Never destroyed: streams outlive static destructors.
struct World {
  std::mutex mutex;
  std::map<uintptr_t, Allocation> allocations;  // by visible address
  std::map<void*, std::shared_ptr<StreamState>> streams;
  std::map<void*, std::shared_ptr<EventState>> events;
  std::map<int, size_t> used;  // bytes by device
  std::condition_variable event_done;
  Clock host;
  uintptr_t next_handle = 0x10000;
  size_t next_stream = 0;
  const size_t devices = NumberFrom("STANDIN_DEVICES", 8);
  const size_t memory = NumberFrom("STANDIN_MEMORY_BYTES", SIZE_MAX);
  const size_t delay_us = NumberFrom("STANDIN_DELAY_US", 0);
  std::vector<Fault> faults;

  World() {
    if (const char* spec = std::getenv("STANDIN_FAIL"); spec != nullptr) AddFaults(spec);
  }
  void AddFaults(const std::string& spec) {
    std::istringstream list(spec);
    for (std::string one; std::getline(list, one, ',');) {
      std::istringstream parts(one);
      std::string function, calls, code;
      std::getline(parts, function, ':');
      std::getline(parts, calls, ':');
      std::getline(parts, code, ':');
      faults.push_back({function, std::stol(calls), std::stoi(code)});
    }
  }
};

World& TheWorld() {
  static World* const world = new World;
  return *world;
}

thread_local int current_device = 0;

void* NewHandle(World& world) {
  world.next_handle += 16;
  return reinterpret_cast<void*>(world.next_handle);
}

void RunStream(const std::shared_ptr<StreamState>& stream) {
  World& world = TheWorld();
  std::minstd_rand random(static_cast<unsigned>(getpid()) * 31 + static_cast<unsigned>(stream->number));
  std::unique_lock<std::mutex> lock(world.mutex);
  for (;;) {
    stream->changed.wait(lock, [&] { return !stream->queue.empty() || stream->destroyed; });
    if (stream->queue.empty()) return;
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->busy = true;
    if (!stream->aborted || work.always) {
      stream->interrupt = work.interrupt;
      lock.unlock();
      if (world.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % world.delay_us));
      if (work.run) work.run();
      lock.lock();
      stream->interrupt = nullptr;
    }
    if (work.marks != nullptr) {
      work.marks->done = true;
      world.event_done.notify_all();
    }
    stream->busy = false;
    stream->changed.notify_all();
  }
}

std::shared_ptr<StreamState> FindStream(World& world, void* handle, const char* function) {
  const auto found = world.streams.find(handle);
  if (handle == nullptr) {
    Violation(std::string(function) + ": the default stream");
  } else if (found == world.streams.end()) {
    Violation(std::string(function) + ": no stream, or one that has been destroyed");
  } else if (found->second->device != current_device) {
    Violation(std::string(function) + ": a stream of device " + std::to_string(found->second->device) +
              " while device " + std::to_string(current_device) + " is current");
  } else {
    return found->second;
  }
  return nullptr;
}

std::shared_ptr<EventState> FindEvent(World& world, void* handle, const char* function) {
  const auto found = world.events.find(handle);
  if (found != world.events.end()) return found->second;
  Violation(std::string(function) + ": no event, or one that has been destroyed");
  return nullptr;
}

void Push(StreamState& stream, Work work) {
  stream.queue.push_back(std::move(work));
  stream.changed.notify_all();
}

// The next moment of the stream.
void Advance(World& world, StreamState& stream) {
  Join(stream.clock, world.host);
  stream.clock.resize(std::max(stream.clock.size(), stream.number + 1));
  stream.clock[stream.number] = ++stream.tick;
}

// Where the streams find the range; null for pageable memory of the host, and where it may not be used.
char* Use(World& world, const Range& range, const StreamState& stream, bool* fine) {
  const auto begin = reinterpret_cast<uintptr_t>(range.memory);
  auto found = world.allocations.upper_bound(begin);
  if (found == world.allocations.begin()) return nullptr;
  --found;
  Allocation& allocation = found->second;
  if (begin >= found->first + allocation.mapped) return nullptr;
  if (allocation.freed || begin + range.bytes > found->first + allocation.bytes) {
    Violation(allocation.freed ? "memory that has been freed is used" : "more bytes are used than were allocated");
    *fine = false;
    return nullptr;
  }
  if (!allocation.host && allocation.device != stream.device) {
    Violation("memory of device " + std::to_string(allocation.device) + " on a stream of device " +
              std::to_string(stream.device));
    *fine = false;
    return nullptr;
  }
  auto& accesses = allocation.accesses;
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                [&](const Access& a) { return At(world.host, a.stream) >= a.tick; }),
                 accesses.end());
  for (const Access& a : accesses) {
    if (a.end <= begin || begin + range.bytes <= a.begin || !(a.writes || range.writes)) continue;
    if (a.stream == stream.number || At(stream.clock, a.stream) >= a.tick) continue;
    Violation("streams " + std::to_string(a.stream) + " and " + std::to_string(stream.number) +
              " use the same memory with nothing to order them");
  }
  accesses.push_back({begin, begin + range.bytes, stream.number, stream.tick, range.writes});
  return allocation.real + (begin - found->first);
}

}  // namespace

void Violation(const std::string& what) {
  const std::string line = "stand-in: violation: " + what + "\n";
  std::fputs(line.c_str(), stderr);
  const char* log = std::getenv("STANDIN_LOG");
  if (log == nullptr) return;
  const int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  const ssize_t written = write(fd, line.data(), line.size());
  if (written < 0) std::perror("stand-in: STANDIN_LOG");
  close(fd);
}

int Injected(const char* function) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  int code = 0;
  for (Fault& fault : world.faults) {
    if (fault.function == function && --fault.calls_left == 0) code = fault.code;
  }
  if (code < 0) kill(getpid(), -code);
  return code;
}

int CountDevices(const char* visible_variable) {
  const char* visible = std::getenv(visible_variable);
  if (visible == nullptr || visible[0] == '\0') return static_cast<int>(TheWorld().devices);
  return 1 + static_cast<int>(std::count(visible, visible + std::strlen(visible), ','));
}

int PhysicalDevice(const char* visible_variable, int device) {
  const char* visible = std::getenv(visible_variable);
  if (visible == nullptr || visible[0] == '\0') return device;
  std::istringstream list(visible);
  std::string id;
  for (int i = 0; i <= device; i++) std::getline(list, id, ',');
  return std::atoi(id.c_str());
}

int CurrentDevice() { return current_device; }
void SetCurrentDevice(int device) { current_device = device; }

Status Allocate(void** memory, size_t bytes, bool host) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  if (!host && (bytes > world.memory || world.used[current_device] > world.memory - bytes)) return Status::kNoMemory;
  const size_t mapped = (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096;
  const int fd = memfd_create("standin", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(mapped)) != 0) return Status::kNoMemory;
  void* real = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* visible = host ? real : mmap(nullptr, mapped, PROT_NONE, MAP_SHARED, fd, 0);
  close(fd);
  if (real == MAP_FAILED || visible == MAP_FAILED) return Status::kNoMemory;
  std::memset(real, 0xa5, mapped);  // never zeros by luck
  Allocation allocation{
      static_cast<char*>(visible), static_cast<char*>(real), bytes, mapped, host, false, current_device, {}};
  world.allocations.emplace(reinterpret_cast<uintptr_t>(visible), std::move(allocation));
  if (!host) world.used[current_device] += bytes;
  *memory = visible;
  return Status::kOk;
}

Status Free(void* memory, bool host) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  const auto found = world.allocations.find(reinterpret_cast<uintptr_t>(memory));
  if (found == world.allocations.end() || found->second.freed || found->second.host != host) {
    Violation("memory is freed that is not allocated, or by the wrong function");
    return Status::kInvalid;
  }
  Allocation& allocation = found->second;
  for (const Access& a : allocation.accesses) {
    if (At(world.host, a.stream) < a.tick) {
      Violation("memory is freed while stream " + std::to_string(a.stream) + " may still use it");
      break;
    }
  }
  allocation.freed = true;
  allocation.accesses.clear();
  if (!host) world.used[allocation.device] -= allocation.bytes;
  // The addresses are never used again, so that a late use is found out; the pages go back.
  mmap(allocation.visible, allocation.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (!host) munmap(allocation.real, allocation.mapped);
  return Status::kOk;
}

void Memory(size_t* free, size_t* total) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  *total = world.memory;
  *free = world.memory - world.used[current_device];
}

Status NewStream(void** stream) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  auto state = std::make_shared<StreamState>();
  state->number = world.next_stream++;
  state->device = current_device;
  *stream = NewHandle(world);
  world.streams.emplace(*stream, state);
  std::thread(RunStream, state).detach();
  return Status::kOk;
}

Status DestroyStream(void* stream) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  const auto state = FindStream(world, stream, "destroying a stream");
  if (state == nullptr) return Status::kInvalid;
  state->destroyed = true;  // it ends when it has done what is queued
  state->changed.notify_all();
  world.streams.erase(stream);
  return Status::kOk;
}

Status Synchronize(void* stream) {
  World& world = TheWorld();
  std::unique_lock<std::mutex> lock(world.mutex);
  const auto state = FindStream(world, stream, "synchronizing a stream");
  if (state == nullptr) return Status::kInvalid;
  const Clock clock = state->clock;
  state->changed.wait(lock, [&] { return state->queue.empty() && !state->busy; });
  Join(world.host, clock);
  return Status::kOk;
}

Status QueryStream(void* stream, bool* done) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  const auto state = FindStream(world, stream, "asking for a stream");
  if (state == nullptr) return Status::kInvalid;
  *done = state->queue.empty() && !state->busy;
  if (*done) Join(world.host, state->clock);
  return Status::kOk;
}

Status AbortStream(void* stream) {
  World& world = TheWorld();
  std::unique_lock<std::mutex> lock(world.mutex);
  const auto state = FindStream(world, stream, "aborting a stream");
  if (state == nullptr) return Status::kInvalid;
  state->aborted = true;
  if (state->interrupt) state->interrupt();
  state->changed.wait(lock, [&] { return state->queue.empty() && !state->busy; });
  state->aborted = false;
  return Status::kOk;
}

Status NewEvent(void** event) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  *event = NewHandle(world);
  world.events.emplace(*event, std::make_shared<EventState>());
  return Status::kOk;
}

Status DestroyEvent(void* event) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  if (FindEvent(world, event, "destroying an event") == nullptr) return Status::kInvalid;
  world.events.erase(event);
  return Status::kOk;
}

Status RecordEvent(void* event, void* stream) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  const auto state = FindStream(world, stream, "recording an event");
  if (state == nullptr || FindEvent(world, event, "recording an event") == nullptr) return Status::kInvalid;
  Advance(world, *state);
  auto recorded = std::make_shared<EventState>();
  recorded->recorded = true;
  recorded->clock = state->clock;
  world.events[event] = recorded;  // a wait for an earlier record keeps that
  Work work;
  work.marks = recorded;
  work.always = true;
  Push(*state, std::move(work));
  return Status::kOk;
}

Status StreamWait(void* stream, void* event) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  const auto state = FindStream(world, stream, "waiting for an event");
  const auto awaited = FindEvent(world, event, "waiting for an event");
  if (state == nullptr || awaited == nullptr) return Status::kInvalid;
  if (!awaited->recorded) {
    Violation("a stream waits for an event that nobody has recorded");
    return Status::kInvalid;
  }
  Join(state->clock, awaited->clock);
  Work work;
  work.run = [awaited] {
    World& world = TheWorld();
    std::unique_lock<std::mutex> lock(world.mutex);
    world.event_done.wait(lock, [&] { return awaited->done; });
  };
  Push(*state, std::move(work));
  return Status::kOk;
}

Status QueryEvent(void* event, bool* done) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  const auto state = FindEvent(world, event, "asking for an event");
  if (state == nullptr) return Status::kInvalid;
  if (!state->recorded) {
    Violation("an event is asked for that nobody has recorded");
    return Status::kInvalid;
  }
  *done = state->done;
  if (state->done) Join(world.host, state->clock);
  return Status::kOk;
}

Status Enqueue(void* stream, Task task) {
  World& world = TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  const auto state = FindStream(world, stream, "enqueuing");
  if (state == nullptr) return Status::kInvalid;
  Advance(world, *state);
  bool fine = true;
  std::vector<char*> real;
  for (const Range& range : task.ranges) {
    real.push_back(range.bytes == 0 ? nullptr : Use(world, range, *state, &fine));
    if (range.bytes > 0 && real.back() == nullptr && fine) {
      Violation("memory that is not the device's, nor pinned");
      fine = false;
    }
  }
  if (!fine) return Status::kInvalid;
  Work work;
  work.run = [run = std::move(task.run), real] { run(real); };
  work.interrupt = std::move(task.interrupt);
  Push(*state, std::move(work));
  return Status::kOk;
}

Status CopyAsync(void* to, const void* from, size_t bytes, Direction direction, void* stream) {
  World& world = TheWorld();
  std::shared_ptr<StreamState> state;
  bool pageable = false;
  {
    std::lock_guard<std::mutex> guard(world.mutex);
    state = FindStream(world, stream, "copying");
    if (state == nullptr) return Status::kInvalid;
    Advance(world, *state);
    bool fine = true;
    char* real_to = Use(world, {to, bytes, true}, *state, &fine);
    char* real_from = Use(world, {const_cast<void*>(from), bytes, false}, *state, &fine);
    if (real_to == nullptr && direction == Direction::kToHost) real_to = static_cast<char*>(to), pageable = true;
    if (real_from == nullptr && direction == Direction::kToDevice) {
      real_from = const_cast<char*>(static_cast<const char*>(from));
      pageable = true;
    }
    if (!fine) return Status::kInvalid;
    if (real_to == nullptr || real_from == nullptr) {
      Violation("a copy from or to memory that is not the device's");
      return Status::kInvalid;
    }
    Work work;
    work.run = [=] { std::memmove(real_to, real_from, bytes); };
    Push(*state, std::move(work));
  }
  return pageable ? Synchronize(stream) : Status::kOk;
}

}  // namespace standin

extern "C" __attribute__((visibility("default"))) void standin_fail(const char* spec) {
  auto& world = standin::TheWorld();
  std::lock_guard<std::mutex> guard(world.mutex);
  world.AddFaults(spec);
}

// What a library has that isn't simulated. An error code for all of them.
extern "C" __attribute__((visibility("default"))) int standin_refuse(const char* function) {
  standin::Violation(std::string(function) + " is called, which is not simulated");
  return 999;
}
