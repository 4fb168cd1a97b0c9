// How an operation runs between the ranks of a host.
//
// Words, and who writes them: each rank writes only its own post, its own ready, reduced and done counters and its own
// slots; the lane word of a channel is set once per operation by compare-and-swap; `left` is counted up by everyone.
//
//  1. A rank takes the next sequence number k of the name's channel and publishes its post k: signature, count and,
//     where it fits, the payload. (Why post k may overwrite post k-2: see Post.)
//  2. It waits for everybody's post k and compares. If two differ then each rank sees one that differs from its own,
//     so all of them report and none goes on: a mismatch is an error everywhere and hangs nobody.
//  3. The data, by size:
//     - kInlineBytes: it is in the post. One meeting of the ranks.
//     - one chunk: it is in the rank's slot before it posts. One meeting. With more ranks than cores a chunk may take
//       all slots.
//     - more, pipelined: a rank copies chunk c into its slot c mod kSlots once all others are done with chunk
//       c-kSlots, and raises `ready`; when everybody's chunk c is ready it reads them all straight from their slots
//       into its output, and raises `done`. It stages some chunks ahead, so that a meeting is rarely waited for.
//     - an all-reduce of more from kSplitRanks ranks on (and of less with more ranks than cores, as one chunk): between
//       ready and done each rank reduces its part of chunk c, in place in its own slot, and raises `reduced`; then it
//       copies all parts to its output. Chunk c+1 is reduced before chunk c is copied out, which again leaves the
//       others time.
//  4. The lane of an operation is picked by the first rank to need it and given back by the last to leave. Lanes
//     belong to operations, so that names in flight side by side can't fill each other's slots; the lowest free lane
//     is taken, so that operations one after another stay in the same, cached, memory.
//
// Nobody waits in a circle. In a pipeline a rank at chunk c waits for `ready` of chunk c, which needs `done` of chunk
// c-kSlots, and ranks reach chunk c only after they are done with all before it. In a split a rank stages at most
// kSlots-2 ahead of chunk c, which needs `done` of chunk c-2, and everyone is done with that before chunk c.
//
// Reduction goes from rank 0 upwards for each element, wherever the chunks are cut: the bits depend on size and inputs
// only, and all ranks have the same (in a split because each element is reduced once).
//
// If a rank gives up at its deadline, it says so in its status and the others follow: the ranks are at different places
// then and the communicator is finished. The same where a rank fails for a reason of its own (no memory, Ctrl-C) and
// the policy is to fail. Where it is to recover, such a rank is out alone: it says so, its heart stands still, and the
// others wait for the launcher, which ends its process, if it has not ended itself, and then marks it lost like any
// that dies. A rank whose communicator was closed under it, by another of its threads, says nothing: that one has. No
// waiter relies on being woken: each sleep ends by itself after kSlice. What a caller brings is only read, unless it
// asked for in place.
//
// When a rank dies, and the launcher's policy is to fail, whoever waits for anybody throws PeerLostError when it next
// looks around. When the policy is to recover, the others go on without it, all of them alike:
//
//  5. The words by which a rank publishes are fenced before its death is announced (Segment::MarkLost): what they say
//     then they say forever. Owner and launcher change a word by compare-and-swap and fetch-or, so that one of them is
//     first, and a rank that is expelled though it lives can't publish and learns it: see 11.
//  6. A rank's part in an operation is *finished* when its last word there is out: its post, if all is in place with
//  it;
//     else its last `ready`, and in a split its last `reduced`. (A broadcast needs only the root's.) Nobody returns
//     before he has seen everybody's last word: he waits for all posts, and no chunk can be read before it is there.
//     Where operations differ, the last word is the complaint, and only that, for whoever has seen that they differ: he
//     returns after he has seen everybody's. Who has not seen it yet may take the dead rank's part for unfinished by
//     the measure of his own operation (then he leaves without a complaint) or for finished (then he comes to see that
//     they differ). If the dead rank has complained then it has seen all posts, so all are there and everybody comes to
//     complain; if not then nobody returns, and those who wait for a complaint leave as well. So:
//       - if the dead rank's part is finished then its slots and words hold all that is still to be read, nobody waits
//         for it any more (it reads nothing, so its `done` is not waited for), and everybody ends the operation with
//         it;
//       - if not, then nobody has ended the operation, nor ever can, and everybody does it again without the dead rank.
//     Which of the two it is, is read from words that don't change any more, so every survivor reads the same.
//  7. Doing it again. The deaths have an order (Header::death_order, append-only). *Generation* g of a name are all
//  ranks
//     but the first g dead; each generation has a channel of its own, so that words and slots of an attempt that failed
//     are left as they are for those who still have to look at them. A rank leaves generation g only when it has found
//     a member's part there unfinished for ever; then all do, for the same operation. Hence the survivors' operations
//     under a name are paired in each generation as they were in the one before. Another death in g+1, or one that was
//     known before but comes later in the order, is the same case again. A rank may miss a death for as long as it
//     likes: it comes to the same conclusions later. Nobody waits for one who has gone on to g+1, because that one's
//     reason holds for the waiter too, who looks around at least every kSlice, and at once when a death is announced.
//  8. Inputs are as they were: outputs may have been written, inputs not (what is asked for in place is copied before).
//  9. Several operations that have to be of one mind (RunAll, Settle: a step's gradients) are run one after another;
//     those that ended in an earlier generation than the latest are then done again in that. Everybody knows the same
//     generations, so everybody does the same operations again, in the same order, and no result is given out before.
// 10. Lanes of operations that failed, or whose member died before it left, stay bound: at most those in flight at a
//     death, until the next cluster version brings a new segment. Who finds no lane waits for one.
// 11. A rank that is expelled while it lives (the launcher couldn't end it) may be between any two instructions, and go
//     on there at any time. What it does then harms nobody:
//       - Its counters, and the word by which it gives up, are fenced, that word first: nothing that follows from being
//         expelled makes the others give up, and what it had said before they disregard once it is in the list of
//         deaths. Its next step fails, or its next look around finds it dead; it then closes its own communicator, no
//         more.
//       - It writes plainly to its own posts, slots, complaints and status. Of these the others read only what its
//         counters had announced. To write that again it would have to announce something else first: post k is written
//         over by k+2, after k+1; a slot after the others are done with it; another operation's chunk only in a lane
//         that everybody has left. The parts of its slots that others write are none.
//       - `left`: counted up by it only in an operation that it has ended, in which it counts; if it is the last then
//       it
//         gives back, late, a lane that nobody else can give back or use until then. The channel is its own for as long
//         (ChannelHead::users), hence `left` and the lane word are those of that operation still: no later one of the
//         same name and generation can be ended without it.
//       - A lane that it takes is free or has been bound to the operation by another; who binds is decided by one
//         compare-and-swap, and who comes second gives back what it took. If it is never seen again the lane stays
//         bound.
//       - The table of names: channel_table.h.
//
// tests/cpp/recovery_test.cc kills a rank at each KUNGFU_FAULT_POINT below and looks what the others have.
#include "collectives/communicator.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/fault_point.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/memory.h"
#include "collectives/dtype.h"
#include "collectives/observer.h"
#include "collectives/traffic.h"

namespace kungfu {

namespace {

constexpr auto kSlice = std::chrono::milliseconds(20);
// About 50 us: longer than a rank that has a core of its own needs to answer, shorter than a scheduler's turn.
constexpr int kSpinTurns = 1000;
// With more ranks than cores, whoever spins keeps the one that it waits for from running: he passes the core on
// instead. A turn takes about 0.4 us where nobody else wants the core, and a scheduler's turn where many do: hence no
// number.
constexpr auto kYieldTime = std::chrono::microseconds(50);
// A yield needn't pass the core on: the scheduler keeps whom it owes time. Who was woken late, after a rank that ran
// on, is owed some, and would then turn in vain through all of kYieldTime in operation after operation (64 KiB with
// four ranks on two cores: 100 us instead of 40). So many turns in a row that came back at once, about 5 us, while a
// rank that is behind was last seen on this core: then it sleeps, which does pass the core on.
constexpr int kVainTurns = 10;
constexpr auto kVainTurn = std::chrono::nanoseconds(1500);
// Chunks staged beyond the one that is being read. Each meeting costs a change of the running rank where cores are
// scarce, so a rank then stages all that there is room for.
constexpr uint32_t kAhead = 2;
// Staging and reading take turns in pieces of this size: one reads the caller's memory while the other reads the other
// ranks' caches and writes the result, and the processor has more of its loads and stores under way. The smaller one
// is for results that are streamed: two ranks take 31 ms for 256 MiB where they take 37 with the larger one, which is
// the quicker one where all is in the caches (1 MiB: 0.20 ms instead of 0.24).
constexpr size_t kBlend = 16 << 10;
constexpr size_t kBlendStreamed = 4 << 10;
// What is staged at once goes past the caches from this size on: no slower where the ranks share one, three times
// quicker where they don't. More, in chunks, see StagingChoice.
constexpr size_t kStreamOnce = 4 << 10;
constexpr uint32_t kAheadOversubscribed = shm::kSlots - 1;
// For the same reason it brings up to this much at once, as one chunk that takes all of its slots.
constexpr size_t kWholeBytes = 3 * shm::kSlotBytes;
// From this number of ranks on an all-reduce is split among them.
constexpr uint32_t kSplitRanks = 3;
// What would be brought at once is split where all ranks together bring more than this: one more change of the running
// rank, against each rank's reading everything (four ranks on two cores, 256 KiB: 80 us instead of 130; eight: 180
// instead of 510).
constexpr size_t kSplitWholeBytes = 384 << 10;

// Results from this size on are written past the caches: they would not be there any more when they are used.
constexpr size_t kStreamBytes = 8 << 20;

// Thrown where an operation can't be finished without somebody who is dead, and has to be done again.
struct Unfinished {};

// This rank is out, though its process lives.
struct Expelled : Error {
  using Error::Error;
};

// The operation failed at all ranks alike, and the communicator goes on.
struct FailedEverywhere : Error {
  using Error::Error;
};

// This rank's communicator was closed before, or meanwhile, by another of its threads perhaps. Nothing to tell the
// others: whoever closed it has told them what they are to know.
struct Closed : Error {
  using Error::Error;
};

// Words of a complaint follow the sequence at this distance, so that they never come to look ahead of it (see Counter).
constexpr uint32_t kComplaintPeriod = 1u << 28;
static_assert(kComplaintPeriod < shm::Counter::kMask / 2);

// Whether what a rank writes may be what it, or another operation, still has to read.
bool InPlace(const Operation& operation) {
  for (size_t i = 0; i < operation.num_tensors; i++) {
    if (operation.tensors[i].input == operation.tensors[i].output && operation.tensors[i].count > 0) return true;
  }
  return false;
}

}  // namespace

// Operations that read their inputs from copies, where they are in place, for as long as this object lives. The memory
// belongs to the thread and is kept: fresh pages cost more than the copy.
class Communicator::KeptInputs {
 public:
  KeptInputs(const Operation* operations, size_t num_operations) {
    size_t bytes = 0;
    Each(operations, num_operations, [&](const kf_tensor&, size_t n) { bytes += Aligned(n); });
    thread_local Memory memory;
    char* at = memory.Get(bytes);
    tensors_.resize(num_operations);
    for (size_t k = 0; k < num_operations; k++) {
      operations_.push_back(operations[k]);
      if (!InPlace(operations[k])) continue;
      tensors_[k].assign(operations[k].tensors, operations[k].tensors + operations[k].num_tensors);
      operations_.back().tensors = tensors_[k].data();
      for (kf_tensor& tensor : tensors_[k]) {
        const size_t n = tensor.count * SizeOf(operations[k].dtype);
        if (n == 0) continue;
        std::memcpy(at, tensor.input, n);
        tensor.input = at;
        at += Aligned(n);
      }
    }
  }
  const Operation* operations() const { return operations_.data(); }

 private:
  template <typename Visit>
  static void Each(const Operation* operations, size_t num_operations, const Visit& visit) {
    for (size_t k = 0; k < num_operations; k++) {
      if (!InPlace(operations[k])) continue;
      for (size_t i = 0; i < operations[k].num_tensors; i++) {
        visit(operations[k].tensors[i], operations[k].tensors[i].count * SizeOf(operations[k].dtype));
      }
    }
  }

  std::vector<Operation> operations_;
  std::vector<std::vector<kf_tensor>> tensors_;
};

// How long a wait may take, and when it says that it has taken long.
class Communicator::Patience {
 public:
  using Clock = std::chrono::steady_clock;

  Patience(std::chrono::milliseconds limit, std::chrono::milliseconds tell_after)
      : began_(Clock::now()), counts_from_(began_), limit_(limit), tell_after_(tell_after) {}

  bool Ended(Clock::time_point now) const { return now - counts_from_ > limit_; }
  void CountFrom(Clock::time_point now) { counts_from_ = now; }
  // Says `what`(seconds) at growing distances.
  template <typename What>
  void Tell(Clock::time_point now, const What& what) {
    if (now - began_ < tell_after_) return;
    tell_after_ *= 2;
    LogSometimes(what(std::chrono::duration<double>(now - began_).count()));
  }
  std::string Limit() const { return Text("within ", limit_.count() / 1000.0, " s"); }

 private:
  const Clock::time_point began_;
  Clock::time_point counts_from_;
  const std::chrono::milliseconds limit_;
  std::chrono::milliseconds tell_after_;
};

// An operation under way at this rank.
struct Communicator::Flight {
  Flight(const Operation& op, const Channel& use, const Members& of, uint32_t size, bool oversubscribed)
      : operation(op),
        members(of),
        generation(use.generation),
        channel(use.index),
        sequence((use.sequence + 1) & shm::Counter::kMask),
        signature(SignatureOf(op)),
        count(CountOf(op)),
        unit(SizeOf(op.dtype)),
        parts(op.kind == Kind::kReduceScatter ? size : 1),
        part_bytes(count * unit / parts),
        whole(oversubscribed && part_bytes * parts <= kWholeBytes),
        splits(op.kind == Kind::kAllReduce && of.size() >= kSplitRanks &&
               part_bytes > (whole ? kSplitWholeBytes / of.size() : shm::kSlotBytes)),
        chunk_bytes((whole ? shm::kSlots : 1) * shm::kSlotBytes / parts / shm::kLine * shm::kLine),
        chunks(static_cast<uint32_t>((part_bytes + chunk_bytes - 1) / chunk_bytes)),
        inlined(count * unit <= shm::kInlineBytes),
        reduce(op) {}

  bool AtOnce() const { return inlined || (chunks <= 1 && !splits); }
  bool Brings(uint32_t rank) const { return operation.kind != Kind::kBroadcast || operation.root == rank; }
  // The slot that chunk `chunk` goes into, where the lane's counters stand at `base`.
  uint32_t SlotOf(uint32_t base, uint32_t chunk) const { return whole ? 0 : base + chunk; }
  // Bytes that this rank reads from another one's part of the segment, where that one brings something.
  uint64_t ReadFromEach() const { return splits ? 2 * part_bytes / members.size() : part_bytes; }
  size_t BytesOf(uint32_t chunk) const { return std::min(chunk_bytes, part_bytes - chunk * chunk_bytes); }

  const Operation& operation;
  const Members& members;
  const uint32_t generation;
  const uint32_t channel;
  const uint32_t sequence;
  const uint64_t signature;
  const uint64_t count;  // elements that a rank brings
  const size_t unit;     // bytes of one
  const uint32_t parts;  // into which they are scattered
  const size_t part_bytes;
  const bool whole;          // brought at once, in all slots
  const bool splits;         // each rank reduces a part of it
  const size_t chunk_bytes;  // of a part at a time; whole cache lines, so that parts stay aligned
  const uint32_t chunks;
  const bool inlined;  // it travels in the posts
  Reducer reduce;
  bool bound = false;         // a lane has been bound, and these are its words as the operation began:
  uint32_t lane = 0;          //
  uint32_t base = 0;          // ready and done
  uint32_t base_reduced = 0;  //
  bool differs = false;       // somebody has posted another operation
  // Of the whole operation, from its first wait that is more than a spin on: most never read the clock.
  std::optional<Patience> patience;
};

Communicator::Communicator(uint64_t cluster_version)
    : rank_(0), size_(1), cluster_version_(cluster_version), oversubscribed_(false), ahead_(0) {}

Communicator::Communicator(std::shared_ptr<shm::Segment> segment, uint32_t rank, const std::string& address,
                           bool has_state, const CommunicatorOptions& options)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(segment_->size()),
      cluster_version_(segment_->cluster_version()),
      options_(options),
      oversubscribed_(size_ > segment_->header().cores),
      ahead_(oversubscribed_ ? kAheadOversubscribed : kAhead),
      channels_(std::make_unique<ChannelTable>(
          *segment_, rank, [this](const Operation& operation, auto since) { LookAroundForTable(operation, since); })) {
  for (uint32_t r = 0; r < size_; r++) everyone_.push_back(r);
  if (rank >= size_) throw Error(KF_INVALID, Text("no rank ", rank, " in a cluster of ", size_));
  shm::RankStatus& mine = segment_->status(rank_);
  const auto state = mine.state.Count();
  if (state != static_cast<uint32_t>(shm::RankState::kAbsent)) {
    throw Error(KF_STALE,
                Text("the place of rank ", rank, " in cluster version ", cluster_version_,
                     " has been taken by another program of this worker, or by this process before: in one "
                     "worker one program joins the cluster, once. Start the second one by a kungfu-run of its "
                     "own, and initialize after the last exec, not before"));
  }
  mine.has_state = has_state ? 1 : 0;
  mine.core.store(sched_getcpu(), std::memory_order_relaxed);
  CopyText(mine.address, address);
  Publish(mine.state, static_cast<uint32_t>(shm::RankState::kAttached));
}

Communicator::~Communicator() = default;

// Fails as an operation does: who is interrupted in it is out alone where the others recover, and so on.
void Communicator::Assemble() {
  if (segment_ == nullptr) return;
  process_.Refuse("join");
  OrGiveUp([&] { AwaitMembers(); });
}

void Communicator::AwaitMembers() {
  KUNGFU_FAULT_POINT("before the others have come");
  Patience patience(options_.join_timeout, options_.tell_after);
  const auto attached = static_cast<uint32_t>(shm::RankState::kAttached);
  for (uint32_t r = 0; r < size_; r++) {
    shm::Counter& state = segment_->status(r).state;
    while (!state.Reached(attached)) {
      const uint32_t armed = state.Arm();
      if (shm::Counter::Reached(armed, attached)) break;
      InterruptCheck::Run();
      ThrowIfClosed();
      ThrowIfLost("barrier \"join\": ");
      if (IsDead(rank_)) ThrowExpelled();
      ThrowIfGivenUp();
      const auto now = std::chrono::steady_clock::now();
      if (patience.Ended(now)) {
        throw Error(KF_TIMEOUT, Text("cluster version ", cluster_version_, " has not assembled ", patience.Limit(),
                                     ": rank ", r, " of ", size_, " has not come"));
      }
      patience.Tell(now, [&](double seconds) {
        return Text(PeerName(rank_), " has waited ", static_cast<int>(seconds), " s for rank ", r, " of ", size_,
                    " to join cluster version ", cluster_version_);
      });
      state.Sleep(armed, kSlice);
    }
  }
  ThrowIfLost("barrier \"join\": ");
}

uint64_t Communicator::announced() const {
  return segment_ == nullptr ? cluster_version_ : segment_->header().announced.load(std::memory_order_acquire);
}

uint64_t Communicator::meetings() const {
  return segment_ == nullptr ? 0 : segment_->header().meetings.load(std::memory_order_acquire);
}

void Communicator::CallMeeting(uint64_t number) {
  if (segment_ == nullptr) return;
  process_.Refuse("call a meeting");
  std::atomic<uint64_t>& called = segment_->header().meetings;
  uint64_t seen = called.load(std::memory_order_relaxed);
  while (seen < number && !called.compare_exchange_weak(seen, number, std::memory_order_acq_rel)) {
  }
}

void Communicator::SetBusy(bool busy) {
  if (segment_ != nullptr && !process_.IsCopy())
    segment_->status(rank_).busy.store(busy ? 1 : 0, std::memory_order_release);
}

uint32_t Communicator::StateRoot() const {
  if (segment_ == nullptr) return 0;
  for (const uint32_t r : Living()) {
    if (segment_->status(r).has_state != 0) return r;
  }
  return size_;
}

void Communicator::Close(kf_status status, const std::string& reason) {
  if (process_.IsCopy()) return;  // it refuses everything anyway
  std::lock_guard<std::mutex> guard(close_mutex_);
  (void)CloseFirst(status, reason);
}

// close_mutex_ is held. False: it is closed already.
bool Communicator::CloseFirst(kf_status status, const std::string& reason) {
  if (close_status_ != KF_OK) return false;
  close_status_ = status;
  close_reason_ = reason;
  closed_.store(true, std::memory_order_release);
  return true;
}

void Communicator::Leave() {
  if (segment_ == nullptr || process_.IsCopy()) return;
  shm::Counter& state = segment_->status(rank_).state;
  const auto left = static_cast<uint32_t>(shm::RankState::kLeft);
  // One that is expelled can't say so any more, and needn't.
  if (!state.Reached(left)) (void)state.Advance(left);
}

// Runs what is between this rank and the others. What it throws finishes the communicator, but for what all throw
// alike.
template <typename Body>
void Communicator::OrGiveUp(const Body& body) {
  try {
    body();
  } catch (const FailedEverywhere&) {
    throw;
  } catch (const Closed&) {
    throw;
  } catch (const Expelled& error) {
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

uint32_t Communicator::Run(const Operation& operation) {
  ThrowIfClosed();
  Validate(operation);
  const auto observed = Observer::Observe(operation);
  if (segment_ == nullptr || size_ == 1) {
    RunAlone(operation);
    if (observed) observed->Done(size_);
    return 0;
  }
  uint32_t generation = 0;
  OrGiveUp([&] {
    // What is brought at once is read before anything is written.
    if (segment_->header().recovers != 0 && InPlace(operation) && operation.kind != Kind::kBroadcast &&
        CountOf(operation) * SizeOf(operation.dtype) > shm::kSlotBytes / size_) {
      const KeptInputs kept(&operation, 1);
      generation = RunShared(*kept.operations(), 0);
    } else {
      generation = RunShared(operation, 0);
    }
  });
  NoteGeneration(operation, generation);
  if (observed) observed->Done(size_);
  return generation;
}

uint32_t Communicator::RunAll(const Operation* operations, size_t num_operations) {
  if (num_operations == 1) {
    const uint32_t generation = Run(operations[0]);
    NoteCommit(operations[0], generation);
    return generation;
  }
  if (size_ == 1) {
    for (size_t k = 0; k < num_operations; k++) Run(operations[k]);
    NoteCommit(operations[0], 0);
    return 0;
  }
  ThrowIfClosed();
  for (size_t k = 0; k < num_operations; k++) Validate(operations[k]);
  std::vector<std::unique_ptr<Observer::Observation>> observed;
  for (size_t k = 0; k < num_operations; k++) observed.push_back(Observer::Observe(operations[k]));
  uint32_t generation = 0;
  OrGiveUp([&] {
    std::optional<KeptInputs> kept;
    if (segment_->header().recovers != 0 && std::any_of(operations, operations + num_operations, InPlace)) {
      operations = kept.emplace(operations, num_operations).operations();
    }
    std::vector<uint32_t> generations;
    for (size_t k = 0; k < num_operations; k++) {
      ThrowIfClosed();
      generations.push_back(RunShared(operations[k], 0));
      KUNGFU_FAULT_POINT("between operations");
    }
    generation = SettleShared(operations, generations.data(), num_operations);
  });
  for (const auto& each : observed) {
    if (each) each->Done(size_);
  }
  return generation;
}

uint32_t Communicator::Settle(const Operation* operations, uint32_t* generations, size_t num_operations) {
  if (segment_ == nullptr) return 0;
  uint32_t latest = 0;
  OrGiveUp([&] { latest = SettleShared(operations, generations, num_operations); });
  return latest;
}

// All survivors have the same generations here, since each operation ended in the same at all of them, and so they do
// the same operations again, in the same order.
uint32_t Communicator::SettleShared(const Operation* operations, uint32_t* generations, size_t num_operations) {
  uint32_t latest = 0;
  for (size_t k = 0; k < num_operations; k++) latest = std::max(latest, generations[k]);
  for (size_t k = 0; k < num_operations; k++) {
    if (generations[k] == latest) continue;
    ThrowIfClosed();
    generations[k] = RunShared(operations[k], latest);
    if (generations[k] > latest) {
      latest = generations[k];
      k = static_cast<size_t>(-1);  // another death: from the beginning
    }
  }
  if (num_operations > 0) {
    NoteGeneration(operations[0], latest);
    NoteCommit(operations[0], latest);
  }
  return latest;
}

void Communicator::NoteGeneration(const Operation& operation, uint32_t generation) {
  if (operation.kind != Kind::kAllReduce) return;
  last_generation_.store(generation, std::memory_order_relaxed);
  std::atomic<uint32_t>& latest = operation.weighted ? gradient_generation_ : reduce_generation_;
  uint32_t seen = latest.load(std::memory_order_relaxed);
  while (seen < generation + 1 && !latest.compare_exchange_weak(seen, generation + 1, std::memory_order_relaxed)) {
  }
}

void Communicator::NoteCommit(const Operation& operation, uint32_t generation) {
  if (!operation.weighted) return;
  commits_.fetch_add(1, std::memory_order_relaxed);
  uint32_t none = 0;
  first_commit_.compare_exchange_strong(none, generation + 1, std::memory_order_relaxed);
  last_commit_.store(generation + 1, std::memory_order_relaxed);
}

Communicator::Reductions Communicator::TakeReductions() {
  const auto take = [](std::atomic<uint32_t>& word) { return word.exchange(0, std::memory_order_relaxed); };
  return {take(gradient_generation_), take(reduce_generation_), take(commits_), take(first_commit_),
          take(last_commit_)};
}

Members Communicator::TakeParticipants() {
  const Reductions taken = TakeReductions();
  const uint32_t latest = taken.gradient > 0 ? taken.gradient : taken.any;
  return MembersOf(latest > 0 ? latest - 1 : 0);
}

Members Communicator::MembersOf(uint32_t generation) const {
  if (segment_ == nullptr) return Members{0};
  Members members = everyone_;
  for (uint32_t d = 0; d < generation; d++) {
    const uint32_t dead = segment_->header().death_order[d];
    members.erase(std::find(members.begin(), members.end(), dead));
  }
  return members;
}

Members Communicator::Living() const {
  if (segment_ == nullptr) return {0};
  return MembersOf(segment_->header().deaths.load(std::memory_order_acquire));
}

void Communicator::Beat() {
  if (segment_ == nullptr || process_.IsCopy() || gave_up_alone_.load(std::memory_order_relaxed)) return;
  segment_->status(rank_).heartbeat.fetch_add(1, std::memory_order_relaxed);
}

void Communicator::Validate(const Operation& operation) const {
  const auto who = [&] { return Text(NameOf(operation.kind), " \"", operation.name, "\": "); };
  if (operation.name == nullptr || operation.name[0] == '\0') {
    throw Error(KF_INVALID, Text(NameOf(operation.kind), " needs a name that is not empty"));
  }
  if (!IsDtype(operation.dtype)) throw Error(KF_TYPE, Text(who(), "no dtype has number ", int(operation.dtype)));
  if (!IsOp(operation.op)) throw Error(KF_INVALID, Text(who(), "no reduction has number ", int(operation.op)));
  if (operation.kind == Kind::kBroadcast && operation.root >= size_) {
    throw Error(KF_INVALID, Text(who(), "root ", operation.root, " is not a rank of a cluster of ", size_));
  }
  RequireRanks(operation, size_);
  for (size_t i = 0; i < operation.num_tensors; i++) {
    const kf_tensor& tensor = operation.tensors[i];
    if (operation.kind == Kind::kReduceScatter && tensor.count % size_ != 0) {
      throw Error(KF_INVALID, Text(who(), tensor.count, " elements can't be scattered evenly over ", size_, " ranks"));
    }
    const bool needs_output = operation.kind != Kind::kBroadcast || operation.root != rank_;
    if (tensor.count > 0 && ((needs_output && tensor.output == nullptr) ||
                             (tensor.input == nullptr && (needs_output == (operation.kind != Kind::kBroadcast))))) {
      throw Error(KF_INVALID, Text(who(), "tensor ", i, " has no memory"));
    }
  }
}

void Communicator::RunAlone(const Operation& operation) const {
  const size_t unit = SizeOf(operation.dtype);
  for (size_t i = 0; i < operation.num_tensors; i++) {
    const kf_tensor& tensor = operation.tensors[i];
    Copy(tensor.output, tensor.input, tensor.count * unit);
  }
}

uint32_t Communicator::RunShared(const Operation& operation, uint32_t from_generation) {
  const uint64_t began = Ticks();
  ChannelTable::Use use = channels_->Acquire(operation);
  Channel& channel = *use.channel;
  if (channel.generation < from_generation) channels_->MoveTo(from_generation, operation, channel);
  for (;;) {
    Members fewer;
    if (channel.generation > 0) fewer = MembersOf(channel.generation);
    const Members& members = channel.generation > 0 ? fewer : everyone_;
    if (operation.kind == Kind::kBroadcast && !std::count(members.begin(), members.end(), operation.root)) {
      // Every survivor comes here in the same generation, before any of them has brought anything.
      throw FailedEverywhere(
          KF_PEER_LOST, Text("broadcast \"", operation.name, "\": its root, ", PeerName(operation.root), ", ",
                             segment_->status(operation.root).lost_reason, ", cluster version ", cluster_version_));
    }
    Flight flight(operation, channel, members, size_, oversubscribed_);
    if (flight.sequence % kComplaintPeriod == 0) {
      shm::Counter& complaint = segment_->complaint(flight.channel, rank_).sequence;
      if (!complaint.Reached(flight.sequence - 2)) Publish(complaint, flight.sequence - 2);  // which is long over
    }
    try {
      CheckDeaths(flight);
      if (flight.AtOnce()) {
        RunOnce(flight);
      } else {
        RunChunks(flight);
      }
      channel.sequence = flight.sequence;
      CountTraffic(flight, began);
      return flight.generation;
    } catch (const Unfinished&) {
      KUNGFU_FAULT_POINT("before the next generation");
      channels_->MoveTo(flight.generation + 1, operation, channel);
    } catch (const FailedEverywhere&) {
      channel.sequence = flight.sequence;
      throw;
    }
  }
}

void Communicator::CountTraffic(const Flight& flight, uint64_t began) const {
  const bool broadcast = flight.operation.kind == Kind::kBroadcast;
  const uint64_t brought = flight.Brings(rank_) ? flight.count * flight.unit : 0;
  const uint64_t received = broadcast && flight.operation.root == rank_ ? 0 : flight.ReadFromEach();
  Traffic::Get().Count(began, brought, received, broadcast ? static_cast<int>(flight.operation.root) : -1);
}

// Everything that this rank brings is in place before its post: whoever has seen all posts has all he needs.
void Communicator::RunOnce(Flight& flight) {
  const Operation& operation = flight.operation;
  shm::Post& mine = PreparePost(flight);
  uint32_t chunk = 0;
  if (!flight.inlined) {
    BindLane(flight);
    chunk = flight.SlotOf(flight.base, 0);
  }
  const auto payload = [&](uint32_t rank) {
    return flight.inlined ? segment_->post(flight.channel, rank, flight.sequence).payload
                          : segment_->slot(flight.lane, rank, chunk);
  };
  const size_t stride = flight.inlined ? flight.part_bytes : flight.chunk_bytes;
  if (flight.Brings(rank_)) {
    const bool stream = !flight.inlined && flight.part_bytes >= kStreamOnce;
    Cursor input(operation, flight.parts);
    Stage(operation, size_, input, flight.part_bytes, payload(rank_), stride, stream);
    if (stream) StreamFence();
  }
  KUNGFU_FAULT_POINT("before the post");
  Publish(mine.sequence, flight.sequence);
  KUNGFU_FAULT_POINT("after the post");
  AwaitPosts(flight);
  const char* payloads[shm::kMaxRanks];
  for (size_t i = 0; i < flight.members.size(); i++) payloads[i] = payload(flight.members[i]);
  Cursor output(operation, flight.parts);
  Consume(operation, flight.reduce, flight.members, rank_, size_, output, flight.part_bytes, payloads, stride,
          /*stream=*/false);
  KUNGFU_FAULT_POINT("before it leaves");
  if (!flight.inlined) LeaveLane(flight, /*failed=*/false);
}

void Communicator::RunChunks(Flight& flight) {
  // Kinds apart, and sizes by powers of four: what fits a cache behaves otherwise than what doesn't.
  const uint32_t magnitude = std::min<uint32_t>(5, (31 - __builtin_clz(flight.chunks)) / 2);
  const uint32_t history = static_cast<uint32_t>(flight.operation.kind) * 6 + magnitude;
  StagingTurns turns(staging_choice_, history, flight.chunks, flight.chunk_bytes, flight.part_bytes);
  if (flight.splits) {
    RunSplit(flight, turns);
  } else {
    RunPipelined(flight, turns);
  }
}

// Chunk by chunk: stages what comes next, while the others' part of the present one arrives.
void Communicator::RunPipelined(Flight& flight, StagingTurns& turns) {
  const Operation& operation = flight.operation;
  Publish(PreparePost(flight).sequence, flight.sequence);
  KUNGFU_FAULT_POINT("after the post");
  BindLane(flight);
  const uint32_t lane = flight.lane, base = flight.base;
  const Members& members = flight.members;
  shm::Counter& ready = segment_->ready(lane, rank_);
  shm::Counter& done = segment_->done(lane, rank_);

  const bool stream = flight.part_bytes >= kStreamBytes;
  const size_t blend = stream ? kBlendStreamed : kBlend;
  Cursor input(operation, flight.parts);
  Cursor output(operation, flight.parts);
  const uint32_t to_stage = flight.Brings(rank_) ? flight.chunks : 0;
  uint32_t staged = 0;
  turns.BeginStaging();
  for (; staged < std::min(to_stage, ahead_); staged++) StageChunk(flight, turns, staged, input);
  turns.EndStaging();
  AwaitPosts(flight);
  turns.BeginReading();
  const char* slots[shm::kMaxRanks];
  for (uint32_t chunk = 0; chunk < flight.chunks; chunk++) {
    for (size_t i = 0; i < members.size(); i++) {
      const uint32_t r = members[i];
      if (r != rank_ && flight.Brings(r)) Await(segment_->ready(lane, r), base + chunk + 1, r, flight);
      slots[i] = segment_->slot(lane, r, base + chunk);
    }
    char* slot = nullptr;
    size_t staging = 0;
    bool past_caches = false;
    if (staged < to_stage) {
      AwaitRoom(flight, staged);
      slot = segment_->slot(lane, rank_, base + staged);
      staging = flight.BytesOf(staged);
      past_caches = turns.Streams(staged);
    }
    const size_t consuming = flight.BytesOf(chunk);
    for (size_t at = 0; at < std::max(staging, consuming); at += blend) {
      if (at < staging) {
        Stage(operation, size_, input, std::min(blend, staging - at), slot + at, flight.chunk_bytes, past_caches);
      }
      if (at < consuming) {
        const size_t bytes = std::min(blend, consuming - at);
        Consume(operation, flight.reduce, members, rank_, size_, output, bytes, slots, flight.chunk_bytes, stream);
        for (size_t i = 0; i < members.size(); i++) slots[i] += bytes;
      }
    }
    if (stream || past_caches) StreamFence();
    KUNGFU_FAULT_POINT("before a chunk is done");
    if (staging > 0) Publish(ready, base + ++staged);
    KUNGFU_FAULT_POINT("between ready and done");
    Publish(done, base + chunk + 1);
    turns.HaveRead(chunk + 1);
  }
  if (!flight.Brings(rank_)) Publish(ready, base + flight.chunks);
  KUNGFU_FAULT_POINT("before it leaves");
  LeaveLane(flight, /*failed=*/false);
}

// An all-reduce in which each rank reduces one part of every chunk, in place in its own slot: nobody else reads that
// part of it. With n ranks each reads its n parts and then the n reduced ones, where it would read n whole chunks
// otherwise.
void Communicator::RunSplit(Flight& flight, StagingTurns& turns) {
  const Operation& operation = flight.operation;
  Publish(PreparePost(flight).sequence, flight.sequence);
  KUNGFU_FAULT_POINT("after the post");
  BindLane(flight);
  const uint32_t lane = flight.lane, base = flight.base, base_reduced = flight.base_reduced;
  const Members& members = flight.members;
  const auto num = static_cast<uint32_t>(members.size());
  const auto me = static_cast<uint32_t>(std::find(members.begin(), members.end(), rank_) - members.begin());
  shm::Counter& reduced = segment_->reduced(lane, rank_);
  shm::Counter& done = segment_->done(lane, rank_);

  const bool stream = flight.part_bytes >= kStreamBytes;
  Cursor input(operation);
  Cursor output(operation);
  // The part of members[i] in a chunk of `bytes`: where it begins. Parts are whole cache lines, but for the end.
  const auto part_begin = [&](uint32_t i, size_t bytes) {
    const size_t part = (bytes / num + shm::kLine) / shm::kLine * shm::kLine;
    return std::min(bytes, i * part);
  };
  const auto gather = [&](uint32_t chunk) {
    const size_t bytes = flight.BytesOf(chunk);
    for (uint32_t i = 0; i < num; i++) {
      const uint32_t r = members[i];
      if (r != rank_) Await(segment_->reduced(lane, r), base_reduced + chunk + 1, r, flight);
      const size_t begin = part_begin(i, bytes);
      const char* part = segment_->slot(lane, r, flight.SlotOf(base, chunk)) + begin;
      output.Take(part_begin(i + 1, bytes) - begin, [&](const kf_tensor& tensor, size_t offset, size_t at, size_t n) {
        CopyOut(At(tensor.output, offset), part + at, n, stream);
      });
    }
    if (stream) StreamFence();
    KUNGFU_FAULT_POINT("before a chunk is done");
    Publish(done, base + chunk + 1);
    turns.HaveRead(chunk + 1);
  };

  uint32_t staged = 0;
  turns.BeginStaging();
  for (uint32_t chunk = 0; chunk < flight.chunks; chunk++) {
    // One chunk less ahead than there is room for: the chunk before this one is gathered after this one is reduced.
    for (; staged < flight.chunks && staged <= chunk + std::min(ahead_, shm::kSlots - 2); staged++) {
      StageChunk(flight, turns, staged, input);
    }
    if (chunk == 0) {
      turns.EndStaging();
      AwaitPosts(flight);
      turns.BeginReading();
    }
    const size_t begin = part_begin(me, flight.BytesOf(chunk));
    const size_t end = part_begin(me + 1, flight.BytesOf(chunk));
    const void* sources[shm::kMaxRanks];
    for (uint32_t i = 0; i < num; i++) {
      const uint32_t r = members[i];
      if (r != rank_) Await(segment_->ready(lane, r), base + chunk + 1, r, flight);
      sources[i] = segment_->slot(lane, r, flight.SlotOf(base, chunk)) + begin;
    }
    const bool past_caches = turns.Streams(chunk);
    flight.reduce(segment_->slot(lane, rank_, flight.SlotOf(base, chunk)) + begin, sources, num, end - begin,
                  past_caches);
    if (past_caches) StreamFence();
    KUNGFU_FAULT_POINT("before a chunk is reduced");
    Publish(reduced, base_reduced + chunk + 1);
    KUNGFU_FAULT_POINT("after a chunk is reduced");
    if (chunk > 0) gather(chunk - 1);
  }
  gather(flight.chunks - 1);
  KUNGFU_FAULT_POINT("before it leaves");
  LeaveLane(flight, /*failed=*/false);
}

// Waits until nobody reads any more what was in this rank's slot for `chunk`. The dead read nothing.
void Communicator::AwaitRoom(Flight& flight, uint32_t chunk) {
  if (chunk < shm::kSlots) return;
  for (const uint32_t r : flight.members) {
    if (r == rank_) continue;
    Await(segment_->done(flight.lane, r), flight.base + chunk - shm::kSlots + 1, r, flight, /*or_dead=*/true);
  }
}

shm::Post& Communicator::PreparePost(const Flight& flight) {
  shm::Post& post = segment_->post(flight.channel, rank_, flight.sequence);
  post.signature = flight.signature;
  post.count = flight.count | static_cast<uint64_t>(flight.operation.weight) << (64 - shm::kWeightBits);
  return post;
}

// Copies chunk `chunk` of what this rank brings into its slot, once nobody reads what was there.
void Communicator::StageChunk(Flight& flight, StagingTurns& turns, uint32_t chunk, Cursor& input) {
  AwaitRoom(flight, chunk);
  const bool past_caches = turns.Streams(chunk);
  Stage(flight.operation, size_, input, flight.BytesOf(chunk),
        segment_->slot(flight.lane, rank_, flight.SlotOf(flight.base, chunk)), flight.chunk_bytes, past_caches);
  if (past_caches) StreamFence();
  KUNGFU_FAULT_POINT("before a chunk is ready");
  Publish(segment_->ready(flight.lane, rank_), flight.base + chunk + 1);
}

void Communicator::AwaitPosts(Flight& flight) {
  bool equal = true;
  for (const uint32_t r : flight.members) {
    if (r == rank_) continue;
    shm::Post& post = segment_->post(flight.channel, r, flight.sequence);
    Await(post.sequence, flight.sequence, r, flight);
    equal = equal && post.signature == flight.signature && (post.count & shm::kCountMask) == flight.count;
  }
  if (!equal) {
    flight.differs = true;
    ReportMismatch(flight);
  }
  if (!flight.operation.weighted) return;
  std::vector<uint32_t> weights;
  for (const uint32_t r : flight.members) {
    const shm::Post& post = segment_->post(flight.channel, r, flight.sequence);
    weights.push_back(static_cast<uint32_t>(post.count >> (64 - shm::kWeightBits)));
  }
  flight.reduce.Weigh(flight.operation, weights);
}

// Every rank comes here for the same operation, because each has seen a post that differs from its own; but for those
// who leave it because somebody died without a complaint, and then everybody leaves. The lane, if one was bound, is put
// back to its initial state by the last: some may have staged chunks into it already.
void Communicator::ReportMismatch(Flight& flight) {
  shm::Complaint& mine = segment_->complaint(flight.channel, rank_);
  CopyText(mine.text, Describe(flight.operation));
  KUNGFU_FAULT_POINT("before a complaint");
  Publish(mine.sequence, flight.sequence);
  KUNGFU_FAULT_POINT("after a complaint");
  std::vector<std::pair<std::string, std::string>> brought;  // (what, ranks)
  for (const uint32_t r : flight.members) {
    shm::Complaint& theirs = segment_->complaint(flight.channel, r);
    // Or it died before it could say what it brought, as may others: without them there may be no mismatch.
    Await(theirs.sequence, flight.sequence, r, flight);
    const std::string what(theirs.text, strnlen(theirs.text, sizeof theirs.text));
    const auto same = std::find_if(brought.begin(), brought.end(), [&](const auto& b) { return b.first == what; });
    if (same == brought.end()) {
      brought.emplace_back(what, Text("rank ", r));
    } else {
      same->second += Text(", ", r);
    }
  }
  std::string message = Text("the ranks brought different operations under the name \"", flight.operation.name, "\": ");
  for (size_t i = 0; i < brought.size(); i++) {
    message += Text(i == 0 ? "" : "; ", brought[i].second, ": ", brought[i].first);
  }
  KUNGFU_FAULT_POINT("before it leaves");
  LeaveLane(flight, /*failed=*/true);
  throw FailedEverywhere(KF_MISMATCH, message);
}

void Communicator::BindLane(Flight& flight) {
  flight.lane = PickLane(flight);
  flight.base = segment_->done(flight.lane, rank_).Count();
  flight.base_reduced = segment_->reduced(flight.lane, rank_).Count();
  flight.bound = true;
  KUNGFU_FAULT_POINT("after a lane is bound");
}

// The lane of this operation; waits where all are in use, so that any number of operations may be in flight. That ends:
// of those that have one each will be ended by all ranks, unless some rank brings them only after others that wait here
// (more than kLanes in flight, in different orders, and not a thread for each), which runs into the deadline.
uint32_t Communicator::PickLane(Flight& flight) {
  std::atomic<uint64_t>& word = segment_->channel(flight.channel).lane[flight.sequence & 1];
  shm::Counter& waiters = segment_->header().lane_waiters;
  uint64_t seen = word.load(std::memory_order_acquire);
  uint64_t bit = 0;
  for (bool armed_before = false;;) {
    if (seen >> 32 == flight.sequence) return static_cast<uint32_t>(seen) - 1;
    bit = TakeLane();
    if (bit != 0) break;
    const uint32_t armed = waiters.Arm();
    std::atomic_thread_fence(std::memory_order_seq_cst);  // what is given back or bound from here on stirs
    seen = word.load(std::memory_order_acquire);
    if (!std::exchange(armed_before, true)) continue;  // one more look
    if (!flight.patience) flight.patience.emplace(options_.collective_timeout, options_.tell_after);
    LookAround(flight);
    const auto now = std::chrono::steady_clock::now();
    if (SomebodyIsBusy(flight)) flight.patience->CountFrom(now);
    const auto who = [&] { return Text(NameOf(flight.operation.kind), " \"", flight.operation.name, "\": "); };
    if (flight.patience->Ended(now)) {
      throw Error(KF_TIMEOUT, Text(who(), "no room ", flight.patience->Limit(), ", ", shm::kLanes,
                                   " operations that need staging are in flight, cluster version ", cluster_version_));
    }
    flight.patience->Tell(now, [&](double seconds) {
      return Text(who(), PeerName(rank_), " has waited ", static_cast<int>(seconds), " s for room, ", shm::kLanes,
                  " operations that need staging are in flight, cluster version ", cluster_version_);
    });
    waiters.Sleep(armed, kSlice);
    armed_before = false;
  }
  KUNGFU_FAULT_POINT("between taking a lane and binding it");
  const auto lane = static_cast<uint32_t>(__builtin_ctzll(bit));
  const uint64_t bound = static_cast<uint64_t>(flight.sequence) << 32 | (lane + 1);
  if (word.compare_exchange_strong(seen, bound, std::memory_order_acq_rel, std::memory_order_acquire)) {
    StirLaneWaiters();
    return lane;
  }
  GiveLaneBack(bit);  // another rank was first
  return static_cast<uint32_t>(seen) - 1;
}

// The bit of the lowest that is free, which is now this rank's to bind; 0: there is none.
uint64_t Communicator::TakeLane() {
  std::atomic<uint64_t>& lanes = segment_->header().lanes;
  uint64_t used = lanes.load(std::memory_order_relaxed);
  uint64_t bit = 0;
  do {
    bit = ~used & (used + 1);
  } while (bit != 0 &&
           !lanes.compare_exchange_weak(used, used | bit, std::memory_order_acquire, std::memory_order_relaxed));
  return bit;
}

void Communicator::GiveLaneBack(uint64_t bit) {
  segment_->header().lanes.fetch_and(~bit, std::memory_order_seq_cst);
  StirLaneWaiters();
}

// After a change that they wait for, made by a read-modify-write. Either this sees the flag of one who waits, or that
// one, who sets it and then looks once more, sees the change.
void Communicator::StirLaneWaiters() {
  shm::Counter& waiters = segment_->header().lane_waiters;
  if ((waiters.value.load(std::memory_order_seq_cst) & shm::Counter::kSleeps) == 0) return;
  KUNGFU_FAULT_POINT("between a lane's change and the wake-up");
  waiters.Stir();
}

// `left` of this parity is next used two operations later, which nobody reaches before everybody has left this one. Who
// dies in between leaves no more: the lane then stays bound until the cluster version ends.
void Communicator::LeaveLane(const Flight& flight, bool failed) {
  shm::ChannelHead& head = segment_->channel(flight.channel);
  std::atomic<uint32_t>& left = head.left[flight.sequence & 1];
  if (left.fetch_add(1, std::memory_order_acq_rel) + 1 < flight.members.size()) return;
  KUNGFU_FAULT_POINT("as the last to leave");
  left.store(0, std::memory_order_relaxed);
  const uint64_t bound = head.lane[flight.sequence & 1].load(std::memory_order_acquire);
  if (bound >> 32 != flight.sequence) return;  // a mismatch of operations that needed none
  const uint32_t lane = static_cast<uint32_t>(bound) - 1;
  if (failed) {
    for (uint32_t r = 0; r < size_; r++) {
      segment_->ready(lane, r).Clear();
      segment_->reduced(lane, r).Clear();
      segment_->done(lane, r).Clear();
    }
  }
  GiveLaneBack(uint64_t{1} << lane);
}

void Communicator::Publish(shm::Counter& word, uint32_t next) const {
  if (!word.Advance(next)) ThrowExpelled();
}

void Communicator::ThrowExpelled() const {
  throw Expelled(KF_PEER_LOST, Text("this process, ", PeerName(rank_), ", has been expelled from cluster version ",
                                    cluster_version_, ": it ", segment_->status(rank_).lost_reason));
}

bool Communicator::IsDead(uint32_t rank) const {
  const shm::Header& header = segment_->header();
  const uint32_t deaths = header.deaths.load(std::memory_order_acquire);
  return std::count(header.death_order, header.death_order + deaths, static_cast<uint8_t>(rank)) > 0;
}

// Whether all that the others need of `rank` is there. Of the dead: its words don't change any more. As long as no lane
// is bound here, or no difference seen, it may turn out later that something is missing.
bool Communicator::HasFinished(uint32_t rank, const Flight& flight) const {
  if (segment_->complaint(flight.channel, rank).sequence.Reached(flight.sequence)) return true;
  if (flight.differs) return false;
  if (!segment_->post(flight.channel, rank, flight.sequence).sequence.Reached(flight.sequence)) return false;
  if (flight.AtOnce() || !flight.Brings(rank) || !flight.bound) return true;
  return flight.splits ? segment_->reduced(flight.lane, rank).Reached(flight.base_reduced + flight.chunks)
                       : segment_->ready(flight.lane, rank).Reached(flight.base + flight.chunks);
}

// Throws Unfinished where somebody died in, or before, this operation, and Expelled where it is this rank.
void Communicator::CheckDeaths(const Flight& flight) const {
  const shm::Header& header = segment_->header();
  const uint32_t deaths = header.deaths.load(std::memory_order_acquire);
  for (uint32_t d = flight.generation; d < deaths; d++) {
    if (header.death_order[d] == rank_) ThrowExpelled();
    if (!HasFinished(header.death_order[d], flight)) throw Unfinished{};
  }
}

void Communicator::Await(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight, bool or_dead) {
  if (!counter.Reached(target)) AwaitSlowly(counter, target, peer, flight, or_dead);
}

void Communicator::AwaitSlowly(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight, bool or_dead) {
  using Clock = std::chrono::steady_clock;
  if (oversubscribed_) {
    const int core = sched_getcpu();
    segment_->status(rank_).core.store(core, std::memory_order_relaxed);
    int vain_turns = 0;
    auto now = Clock::now();
    for (const auto end = now + kYieldTime; now < end;) {
      sched_yield();
      if (counter.Reached(target)) return;
      const auto before = std::exchange(now, Clock::now());
      vain_turns = now - before < kVainTurn ? vain_turns + 1 : 0;
      if (vain_turns < kVainTurns) continue;
      if (IsInTheWay(core, flight)) break;
      vain_turns = 0;
    }
  } else {
    for (int turn = 0; turn < kSpinTurns; turn++) {
      shm::Pause();
      if (counter.Reached(target)) return;
    }
  }
  if (!flight.patience) flight.patience.emplace(options_.collective_timeout, options_.tell_after);
  for (;;) {
    const uint32_t armed = counter.Arm();
    if (shm::Counter::Reached(armed, target)) return;
    // After it has said that it sleeps (see Counter), and in one order with who marks the dead: see Segment::MarkLost.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    LookAround(counter, target, peer, flight);
    if (or_dead && IsDead(peer)) return;
    const auto now = Clock::now();
    if (SomebodyIsBusy(flight)) flight.patience->CountFrom(now);
    if (flight.patience->Ended(now)) {
      throw Error(KF_TIMEOUT,
                  Text(NameOf(flight.operation.kind), " \"", flight.operation.name, "\": no data from ", PeerName(peer),
                       " ", flight.patience->Limit(), ", cluster version ", cluster_version_));
    }
    flight.patience->Tell(now, [&](double seconds) {
      return Text(NameOf(flight.operation.kind), " \"", flight.operation.name, "\": ", PeerName(rank_), " has waited ",
                  static_cast<int>(seconds), " s for ", Awaited(peer, flight), ", cluster version ", cluster_version_);
    });
    counter.Sleep(armed, kSlice);
    if (counter.Reached(target)) return;
  }
}

// Whoever is missing may itself wait for one that is busy.
bool Communicator::SomebodyIsBusy(const Flight& flight) const {
  return std::any_of(flight.members.begin(), flight.members.end(), [&](uint32_t r) {
    return segment_->status(r).busy.load(std::memory_order_acquire) != 0 && !IsDead(r);
  });
}

// `peer`, and whoever else has not even come.
std::string Communicator::Awaited(uint32_t peer, const Flight& flight) const {
  std::string awaited;
  for (const uint32_t r : flight.members) {
    const bool came = segment_->post(flight.channel, r, flight.sequence).sequence.Reached(flight.sequence);
    if (r != peer && (came || r == rank_)) continue;
    awaited += Text(awaited.empty() ? "" : ", ", PeerName(r));
    if (segment_->status(r).busy.load(std::memory_order_relaxed) != 0) awaited += " (which does something long alone)";
    const std::string gave_up = segment_->GaveUpAlone(r);
    if (!gave_up.empty()) awaited += Text(" (which is out and will be ended: ", gave_up, ")");
  }
  return awaited;
}

// Whether some rank that was last seen on `core`, where this one runs, has published less in this operation than this
// one. A guess that may be late or wrong: it decides only how to wait.
bool Communicator::IsInTheWay(int core, const Flight& flight) const {
  const auto behind = [](const shm::Counter& its, const shm::Counter& own) { return !its.Reached(own.Count()); };
  return core >= 0 && std::any_of(flight.members.begin(), flight.members.end(), [&](uint32_t r) {
           if (r == rank_ || segment_->status(r).core.load(std::memory_order_relaxed) != core) return false;
           if (!segment_->post(flight.channel, r, flight.sequence).sequence.Reached(flight.sequence)) return true;
           const uint32_t lane = flight.lane;
           return flight.bound && (behind(segment_->ready(lane, r), segment_->ready(lane, rank_)) ||
                                   behind(segment_->reduced(lane, r), segment_->reduced(lane, rank_)) ||
                                   behind(segment_->done(lane, r), segment_->done(lane, rank_)));
         });
}

void Communicator::LookAround(const Flight& flight) const {
  InterruptCheck::Run();
  ThrowIfClosed();
  const Operation& operation = flight.operation;
  if (segment_->header().lost.load(std::memory_order_acquire) != 0) {
    ThrowIfLost(Text(NameOf(operation.kind), " \"", operation.name, "\": "));
  }
  CheckDeaths(flight);
  ThrowIfGivenUp();
}

void Communicator::LookAround(const shm::Counter& counter, uint32_t target, uint32_t peer, const Flight& flight) const {
  LookAround(flight);
  // Acquired, so that what it brought before it left is seen: it may have brought its part and left right after.
  const uint32_t state = segment_->status(peer).state.value.load(std::memory_order_acquire) & shm::Counter::kMask;
  if (state == static_cast<uint32_t>(shm::RankState::kLeft) && !counter.Reached(target)) {
    throw Error(KF_PEER_LOST, Text(NameOf(flight.operation.kind), " \"", flight.operation.name, "\": ", PeerName(peer),
                                   " has finished and left, cluster version ", cluster_version_));
  }
}

void Communicator::LookAroundForTable(const Operation& operation, std::chrono::steady_clock::time_point since) const {
  const std::string who = Text(NameOf(operation.kind), " \"", operation.name, "\": ");
  ThrowIfClosed();
  ThrowIfLost(who);
  if (IsDead(rank_)) ThrowExpelled();
  ThrowIfGivenUp();
  if (std::chrono::steady_clock::now() - since > options_.collective_timeout) {
    throw Error(KF_TIMEOUT,
                Text(who, "the table of names was not given back within ", options_.collective_timeout.count() / 1000.0,
                     " s, cluster version ", cluster_version_));
  }
}

void Communicator::ThrowIfClosed() const {
  if (segment_ != nullptr) process_.Refuse("take part in collectives");
  if (!closed_.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> guard(close_mutex_);
  throw Closed(close_status_, close_reason_);
}

void Communicator::ThrowIfLost(const std::string& who) const {
  if (segment_->header().lost.load(std::memory_order_acquire) == 0) return;
  std::string lost;
  for (uint32_t r = 0; r < size_; r++) {
    const shm::RankStatus& status = segment_->status(r);
    if (IsDead(r)) continue;  // that alone would be no reason
    if (!status.state.Reached(static_cast<uint32_t>(shm::RankState::kLost))) continue;
    lost += Text(lost.empty() ? "" : ", ", PeerName(r), " ", status.lost_reason);
  }
  throw Error(KF_PEER_LOST, Text(who, lost, ", cluster version ", cluster_version_));
}

// What the dead have said counts no more; whoever saw it while they lived says the same, and counts.
void Communicator::ThrowIfGivenUp() const {
  if (segment_->header().gave_up.load(std::memory_order_acquire) == 0) return;
  for (uint32_t r = 0; r < size_; r++) {
    const shm::RankStatus& status = segment_->status(r);
    if (!status.gave_up.Reached(static_cast<uint32_t>(shm::GaveUp::kForAll)) || IsDead(r)) continue;
    throw Error(static_cast<kf_status>(status.gave_up_status),
                std::string(status.gave_up_text, strnlen(status.gave_up_text, sizeof status.gave_up_text)));
  }
}

// After a failure the ranks are at different places and this communicator is finished: at the others as well, or else,
// where they recover and the reason is this rank's own, they wait until it is marked lost. Nobody follows one who was
// fenced before it has said anything, or dies while it says it: the others find out by themselves.
//
// What finishes the communicator is what the others are told, and nothing else: it is closed and told under one hold of
// the mutex, by the first of this rank's threads that fails. To the rest of them it is closed; they fail because of
// that first failure, or for a reason that has come too late to matter: a rank that is out alone stays out alone.
void Communicator::GiveUp(const Error& error) {
  if (segment_ == nullptr || process_.IsCopy()) return;
  std::lock_guard<std::mutex> guard(close_mutex_);
  if (!CloseFirst(error.status(), error.what())) return;
  KUNGFU_FAULT_POINT("when it has closed its communicator");
  shm::RankStatus& mine = segment_->status(rank_);
  const kf_status status = error.status();
  const bool recovers = segment_->header().recovers != 0;
  if (recovers && status == KF_STALE) return;  // it leaves, and says that
  // An interrupted rank may have written a part only.
  const bool interrupted = dynamic_cast<const Interrupted*>(&error) != nullptr;
  const bool own =
      interrupted || (status != KF_TIMEOUT && status != KF_PEER_LOST && status != KF_ABORTED && status != KF_MISMATCH);
  const bool alone = own && recovers;
  mine.gave_up_status = own ? KF_ABORTED : status;
  CopyText(mine.gave_up_text, alone ? error.Described() : Text(PeerName(rank_), " gave up: ", error.what()));
  KUNGFU_FAULT_POINT("before it gives up");
  segment_->header().gave_up.store(1, std::memory_order_release);
  (void)mine.gave_up.Advance(static_cast<uint32_t>(alone ? shm::GaveUp::kAlone : shm::GaveUp::kForAll));
  if (alone) gave_up_alone_.store(true, std::memory_order_relaxed);
}

std::string Communicator::PeerName(uint32_t rank) const {
  const shm::RankStatus& status = segment_->status(rank);
  const std::string address(status.address, strnlen(status.address, sizeof status.address));
  return address.empty() ? Text("rank ", rank) : Text("rank ", rank, " (", address, ")");
}

}  // namespace kungfu
