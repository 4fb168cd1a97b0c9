// Implements the lifecycle of a host's communicator, and the repetition of operations. Several
// files share the numbering of the invariants: see host_communicator.h.
//
// 7. Repetition. All ranks see the failures in the same order (ControlBlock::FailedRank is an
// append-only list). *Generation* g of a name has the ranks that remain after the first g failures.
// Each generation has its own channel, so the words and buffers of a failed attempt stay unchanged
// for ranks that still read them. A rank leaves generation g only if a member's contribution in g
// can't be finished any more. Then all ranks leave generation g, in the same operation. So the k-th
// operation with a name is the same on all survivors in each generation, as in the previous
// generation. The same argument applies to a second failure in g+1, even if that failure was
// already known.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverOneFails
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverTwoFail
//
// A rank that notices a failure late reaches the same conclusions. No rank waits forever for a rank
// that has moved to g+1: the waiting rank detects the same failure and moves to g+1 too. A waiting
// rank checks for failures at least every kSlice, and immediately when a failure is announced.
// Test: WithoutOne.SleepingRanksAreWoken
//
// 8. The caller's inputs stay unchanged, because operations only read them. An in-place operation
// works on a copy.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverOneFails
//
// 9. Some operations must end in the same generation (RunAll, Settle: the gradients of a step).
// They run one after another. Then the operations that ended in an earlier generation than the
// latest one are repeated in the latest generation. All ranks know the same generations, so all
// ranks repeat the same operations in the same order. No result is returned before the repetitions
// have ended.
// Test: Recovery.SurvivorsEndEveryOperationAlikeWhereverTwoFail
#include "collectives/host/host_communicator.h"

#include <sched.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fault_point.h"
#include "base/interrupt.h"
#include "collectives/kept_inputs.h"
#include "collectives/lone_communicator.h"
#include "collectives/observer.h"
#include "collectives/operation_span.h"
#include "collectives/traffic.h"

namespace kungfu {
namespace {

// A complaint's counter is advanced after this many operations. Otherwise, after the sequence
// numbers wrap around, an old complaint would appear to be newer than the operation (see Counter).
constexpr uint32_t kComplaintPeriod = 1u << 28;
static_assert(kComplaintPeriod < shm::Counter::kMask / 2);

}  // namespace

// ---- lifecycle

HostCommunicator::HostCommunicator(std::shared_ptr<shm::Segment> segment, uint32_t rank, const std::string& address,
                                   bool has_state, const CommunicatorOptions& options, std::vector<uint32_t> numbers)
    : Communicator(rank, segment->size(), segment->cluster_version()),
      self_{segment,
            *segment,
            shm::SegmentControlBlock(segment, std::move(numbers)),
            rank,
            size_,
            cluster_version_,
            options,
            /*oversubscribed=*/size_ > segment->header().cores,
            process_,
            closure_},
      rules_(self_),
      waiting_(self_, rules_),
      staging_buffers_(self_, rules_, waiting_),
      exchange_(self_, rules_, waiting_, staging_buffers_),
      channels_(self_.segment, self_.control, rank,
                [this](const Operation& operation, auto waited) { rules_.ThrowIfPointless(operation, waited); }) {
  if (rank >= size_) throw Error(KF_INVALID, Text("no rank ", rank, " in a cluster of ", size_));
  if (!self_.control.Attach(rank, address, has_state)) {
    throw Error(KF_STALE,
                Text("rank ", rank, " of cluster version ", cluster_version_,
                     " has joined already, in another program of this worker or earlier in this process; only one "
                     "program of a worker can join, and only once. Start a second program with its own kungfu-run, "
                     "and initialize ms_kungfu only after the last exec"));
  }
  self_.segment.status(rank).core.store(sched_getcpu(), std::memory_order_relaxed);
  if (self_.control.State(rank) == RankState::kLost) rules_.ThrowExpelled();
}

void HostCommunicator::Assemble() {
  process_.Refuse("join");
  OrGiveUp([&] { AwaitMembers(); });
}

void HostCommunicator::AwaitMembers() {
  KUNGFU_FAULT_POINT("before the others have come");
  const std::string title = "barrier \"join\": ";
  host::Deadline deadline(self_.options.join_timeout, self_.options.tell_after);
  const auto attached = static_cast<uint32_t>(RankState::kAttached);
  host::Awaiting awaiting(self_.control, rank_);
  for (uint32_t r = 0; r < size_; r++) {
    shm::Counter& state = self_.segment.status(r).state;
    while (!state.Reached(attached)) {
      const uint32_t armed = state.Arm();
      if (shm::Counter::Reached(armed, attached)) break;
      InterruptCheck::Run();
      rules_.ThrowIfPointless(title);
      const auto now = std::chrono::steady_clock::now();
      if (self_.control.deadlines_held()) deadline.LeaveOut(now);
      if (deadline.Passed(now) && !self_.control.IsEnding(r)) {
        throw Error(KF_TIMEOUT, Text("cluster version ", cluster_version_, ": ", self_.control.PeerName(r), " of ",
                                     size_, " has not joined ", deadline.Limit(), " (KUNGFU_JOIN_TIMEOUT)"));
      }
      deadline.Tell(now, [&](double seconds) {
        return Text(self_.control.PeerName(rank_), " has waited ", static_cast<int>(seconds), " s for ",
                    self_.control.PeerName(r), " of ", size_, " to join cluster version ", cluster_version_);
      });
      awaiting.Note(r, deadline.IsOverdue());
      state.Sleep(armed, host::kSlice);
    }
  }
  rules_.ThrowIfLost(title);
}

// Runs `body`, which communicates with other ranks. If `body` throws, closes the communicator,
// unless all ranks throw the same error.
template <typename Body>
void HostCommunicator::OrGiveUp(const Body& body) {
  try {
    body();
  } catch (const host::FailedEverywhere&) {
    throw;
  } catch (const Closed&) {
    throw;
  } catch (const host::Expelled& error) {
    Close(error.status(), error.what());
    throw;
  } catch (const Error& error) {
    GiveUp(error);
    throw;
  } catch (const std::exception& error) {
    GiveUp(Error(KF_INTERNAL, error.what()));
    throw;
  }
}

void HostCommunicator::GiveUp(const Error& error) {
  if (self_.options.tells) {
    Communicator::GiveUp(error);
  } else {
    Close(error.status(), error.what());
  }
}

void HostCommunicator::LookForDeadlock(bool stands_still, const std::string& place) {
  if (process_.IsCopy()) return;
  if (const auto mismatch = waiting_.deadlocks().Look(stands_still, place)) GiveUp(Error(KF_MISMATCH, *mismatch));
}

// ---- operations

void HostCommunicator::Check(const Operation& operation) const {
  Validate(operation, size_);
  const bool broadcast = operation.kind == Kind::kBroadcast, to_root = IsToRoot(operation.kind);
  const bool root = operation.root == rank_;
  RequireMemory(operation, /*inputs=*/broadcast ? root : !(to_root && root),
                /*outputs=*/broadcast ? !root : !to_root || root);
}

uint32_t HostCommunicator::Run(const Operation& operation) {
  rules_.ThrowIfClosed();
  Check(operation);
  const auto observed = Observer::Observe(operation);
  uint32_t generation = 0;
  if (size_ == 1) {
    RunAlone(operation);
  } else {
    OrGiveUp([&] {
      // An operation with a single chunk reads all inputs before it writes any output, so it needs
      // no copy of its inputs.
      if (self_.control.recovers() && InPlace(operation) && operation.kind != Kind::kBroadcast &&
          CountOf(operation) * SizeOf(operation.dtype) > shm::kBufferBytes / size_) {
        const KeptInputs inputs(&operation, 1);
        generation = RunShared(*inputs.operations(), 0);
      } else {
        generation = RunShared(operation, 0);
      }
    });
    reductions_.Note(operation, generation);
  }
  if (observed) observed->Done(size_);
  return generation;
}

uint32_t HostCommunicator::RunFrom(const Operation& operation, uint32_t from_generation) {
  rules_.ThrowIfClosed();
  uint32_t generation = 0;
  OrGiveUp([&] { generation = RunShared(operation, from_generation); });
  return generation;
}

HostCommunicator::Pinned::Buffer::~Buffer() {
  KUNGFU_FAULT_POINT("before it lets go of a pinned buffer");
  staging_buffers.Leave(channel, sequence, members, /*failed=*/false);
}

HostCommunicator::Pinned HostCommunicator::RunPinned(const Operation& operation, uint32_t from_generation) {
  rules_.ThrowIfClosed();
  Pinned pinned;
  OrGiveUp(
      [&] { pinned.generation_ = *RunGenerations(from_generation, [&](uint32_t) { return &operation; }, &pinned); });
  return pinned;
}

void HostCommunicator::Read(const Pinned& pinned, uint32_t from, const Operation& operation) const {
  const uint64_t began = Ticks();
  KUNGFU_FAULT_POINT("before it reads in a pinned buffer");
  host::CopyToTensors(operation, pinned.Of(from));
  Traffic::Get().Count(began, 0, CountOf(operation) * SizeOf(operation.dtype), static_cast<int>(from));
}

uint32_t HostCommunicator::RunAll(const Operation* operations, size_t num_operations) {
  if (num_operations == 1 || size_ == 1) {
    uint32_t generation = 0;
    for (size_t k = 0; k < num_operations; k++) generation = Run(operations[k]);
    if (num_operations > 0) reductions_.NoteCommit(operations[0], generation);
    return generation;
  }
  rules_.ThrowIfClosed();
  for (size_t k = 0; k < num_operations; k++) Check(operations[k]);
  const ObservedTogether observed(operations, num_operations);
  uint32_t generation = 0;
  OrGiveUp([&] {
    generation = RunAndSettle(RunsShared(), self_.control.recovers(), operations, num_operations);
    reductions_.NoteSettled(operations[0], generation);
  });
  observed.Done(size_);
  return generation;
}

uint32_t HostCommunicator::Settle(const Operation* operations, uint32_t* generations, size_t num_operations) {
  uint32_t latest = 0;
  OrGiveUp([&] {
    latest = SettleBy(RunsShared(), operations, generations, num_operations);
    if (num_operations > 0) reductions_.NoteSettled(operations[0], latest);
  });
  return latest;
}

RunFromGeneration HostCommunicator::RunsShared() {
  return [this](const Operation& operation, uint32_t from_generation) {
    rules_.ThrowIfClosed();
    return RunShared(operation, from_generation);
  };
}

std::optional<uint32_t> HostCommunicator::RunRenewable(Renewable& operation, uint32_t from_generation) {
  rules_.ThrowIfClosed();
  std::optional<uint32_t> generation;
  OrGiveUp([&] {
    if (size_ == 1) {
      const Operation* const ready = operation.In(0);
      if (ready == nullptr) return;
      RunAlone(*ready);
      generation = 0;
      return;
    }
    generation = RunGenerations(from_generation, [&](uint32_t now) {
      const Operation* const renewed = operation.In(now);
      if (renewed != nullptr) Check(*renewed);
      return renewed;
    });
  });
  return generation;
}

uint32_t HostCommunicator::RunShared(const Operation& operation, uint32_t from_generation) {
  return *RunGenerations(from_generation, [&](uint32_t) { return &operation; });
}

template <typename OperationIn>
std::optional<uint32_t> HostCommunicator::RunGenerations(uint32_t from_generation, const OperationIn& operation_in,
                                                         Pinned* pinned) {
  const uint64_t began = Ticks();
  const OperationSpan span(cluster_version_);
  const Operation* ready = operation_in(from_generation);
  if (ready == nullptr) return std::nullopt;
  span.Began(*ready);
  const host::ChannelTable::Use use = channels_.Acquire(*ready);
  host::BoundName& name = *use.name;
  if (name.generation < from_generation) channels_.MoveTo(from_generation, *ready, name);
  for (;;) {
    // A name starts in generation 0 whenever it is bound, and then advances to its current
    // generation.
    if (name.generation != from_generation) ready = operation_in(name.generation);
    if (ready == nullptr) return std::nullopt;
    const Operation& operation = *ready;
    Members fewer;
    if (name.generation > 0) fewer = MembersOf(name.generation);
    const Members& members = name.generation > 0 ? fewer : all_ranks_;
    if (operation.kind == Kind::kBroadcast && !std::count(members.begin(), members.end(), operation.root)) {
      // Every survivor throws this error in the same generation, before any survivor has
      // contributed.
      throw host::FailedEverywhere(
          KF_PEER_LOST, Text("broadcast \"", operation.name, "\": its root, ", self_.control.PeerName(operation.root),
                             ", ", self_.control.LostReason(operation.root), ", cluster version ", cluster_version_));
    }
    host::Flight flight(operation, name, members, size_, self_.oversubscribed);
    try {
      if (flight.sequence % kComplaintPeriod == 0) {
        // Advances the counter to the number of an operation that ended long ago.
        shm::Counter& complaint = self_.segment.complaint(flight.channel, rank_).sequence;
        if (!complaint.Reached(flight.sequence - 2)) rules_.Publish(complaint, flight.sequence - 2);
      }
      rules_.CheckFailures(flight);
      exchange_.Run(flight);
      name.sequence = flight.sequence;
      CountTraffic(flight, began);
      span.Ended(operation);
      if (flight.pinned) {
        KUNGFU_CHECK(pinned != nullptr, "\"", operation.name,
                     "\" pins its staging buffer, but its caller accepts no pinned buffer");
        const int lone =
            flight.StaysInStagingBuffer() && operation.root == rank_ ? static_cast<int>(members.front()) : -1;
        pinned->buffer_.reset(new Pinned::Buffer{self_, staging_buffers_, use.name, flight.channel, flight.sequence,
                                                 flight.staging_buffer, members.size(), lone});
      }
      return flight.generation;
    } catch (const host::Unfinished&) {
      KUNGFU_FAULT_POINT("before the next generation");
      channels_.MoveTo(flight.generation + 1, operation, name);
    } catch (const host::FailedEverywhere&) {
      name.sequence = flight.sequence;
      throw;
    }
  }
}

void HostCommunicator::CountTraffic(const host::Flight& flight, uint64_t began) const {
  const bool broadcast = flight.operation.kind == Kind::kBroadcast;
  const uint64_t brought = flight.Brings(rank_) ? flight.count * flight.unit : 0;
  const uint64_t received = broadcast && flight.operation.root == rank_ ? 0 : flight.ReadFromEach();
  Traffic::Get().Count(began, brought, received, broadcast ? static_cast<int>(flight.operation.root) : -1);
}

}  // namespace kungfu
