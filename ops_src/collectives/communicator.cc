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
//     - an all-reduce of more from kSplitRanks ranks on: between ready and done each rank reduces its part of chunk c,
//       in place in its own slot, and raises `reduced`; then it copies all parts to its output. Chunk c+1 is reduced
//       before chunk c is copied out, which again leaves the others time.
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
// If a rank dies, the launcher marks it lost, and whoever waits for anybody throws PeerLostError when it next looks
// around. If a rank gives up at its deadline, it says so in the segment and the others follow. No waiter relies on
// being woken: each sleep ends by itself after kSlice. What a caller brings is only read, unless it asked for in place.
#include "collectives/communicator.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/dtype.h"
#include "collectives/reduce.h"
#include "collectives/stream.h"
#include "monitoring/gradient_norms.h"
#include "monitoring/traffic.h"

namespace kungfu {

// Walks over an operation's tensors as if the `1/parts` of each that one rank owns lay one after another.
class Cursor {
 public:
  explicit Cursor(const Operation& operation, uint32_t parts = 1)
      : operation_(operation), unit_(SizeOf(operation.dtype)), parts_(parts) {}

  // Calls piece(tensor, offset in the tensor's part, offset in this take, bytes) for each contiguous piece of the next
  // `bytes`.
  template <typename Piece>
  void Take(size_t bytes, const Piece& piece) {
    size_t at = 0;
    while (at < bytes) {
      const kf_tensor& tensor = operation_.tensors[index_];
      const size_t left = tensor.count / parts_ * unit_ - offset_;
      const size_t n = std::min(left, bytes - at);
      if (n > 0) piece(tensor, offset_, at, n);
      at += n;
      offset_ += n;
      if (n == left) {
        index_++;
        offset_ = 0;
      }
    }
  }

 private:
  const Operation& operation_;
  const size_t unit_;
  const size_t parts_;
  size_t index_ = 0;
  size_t offset_ = 0;
};

namespace {

constexpr auto kSlice = std::chrono::milliseconds(20);
// About 50 us: longer than a rank that has a core of its own needs to answer, shorter than a scheduler's turn.
constexpr int kSpinTurns = 1000;
// With more ranks than cores, whoever spins keeps the one that it waits for from running: he passes the core on
// instead. A turn takes about 0.4 us where nobody else wants the core, and a scheduler's turn where many do: hence no
// number.
constexpr auto kYieldTime = std::chrono::microseconds(50);
// Chunks staged beyond the one that is being read. Each meeting costs a change of the running rank where cores are
// scarce, so a rank then stages all that there is room for.
constexpr uint32_t kAhead = 2;
// Staging and reading take turns in pieces of this size: one reads the caller's memory while the other reads the other
// ranks' caches and writes the result, and the processor has more of its loads and stores under way.
constexpr size_t kBlend = 16 << 10;
// What is staged at once goes past the caches from this size on: no slower where the ranks share one, three times
// quicker where they don't. More, in chunks, see StagingChoice.
constexpr size_t kStreamOnce = 4 << 10;
constexpr uint32_t kAheadOversubscribed = shm::kSlots - 1;
// For the same reason it brings up to this much at once, as one chunk that takes all of its slots.
constexpr size_t kWholeBytes = 3 * shm::kSlotBytes;
// From this number of ranks on an all-reduce is split among them.
constexpr uint32_t kSplitRanks = 3;

// Results from this size on are written past the caches: they would not be there any more when they are used.
constexpr size_t kStreamBytes = 8 << 20;
// Reduced in the first-level cache before it is streamed out.
constexpr size_t kStreamBlock = 4096;

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdu;
}

bool Reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduceScatter; }

// Equal at all ranks if and (but for the hash) only if they bring the same operation.
uint64_t SignatureOf(const Operation& operation) {
  uint64_t hash = operation.root;
  for (size_t i = 0; i < operation.num_tensors; i++) hash = Mix(hash, operation.tensors[i].count);
  if (operation.layout != nullptr) {
    for (const char* c = operation.layout; *c != '\0'; c++) hash = Mix(hash, static_cast<unsigned char>(*c));
  }
  const uint64_t op = Reduces(operation.kind) ? operation.op : 0;
  return (hash << 24) | static_cast<uint64_t>(operation.kind) << 16 | static_cast<uint64_t>(operation.dtype) << 8 | op;
}

uint64_t CountOf(const Operation& operation) {
  uint64_t count = 0;
  for (size_t i = 0; i < operation.num_tensors; i++) count += operation.tensors[i].count;
  return count;
}

std::string Describe(const Operation& operation) {
  std::string text = NameOf(operation.kind);
  if (operation.kind == Kind::kBarrier) return text;
  text += Text(" of ", CountOf(operation), " ", NameOf(operation.dtype));
  if (operation.layout != nullptr && operation.layout[0] != '\0') text += Text(" ", operation.layout);
  if (operation.layout == nullptr && operation.num_tensors > 1) text += Text(" in ", operation.num_tensors, " tensors");
  if (Reduces(operation.kind)) text += Text(", ", NameOf(operation.op));
  if (operation.kind == Kind::kBroadcast) text += Text(", root ", operation.root);
  return text;
}

char* At(void* base, size_t offset) { return static_cast<char*>(base) + offset; }
const char* At(const void* base, size_t offset) { return static_cast<const char*>(base) + offset; }

void Copy(void* to, const void* from, size_t bytes) {
  if (to != from && to != nullptr && bytes > 0) std::memcpy(to, from, bytes);
}

void CopyOut(void* to, const void* from, size_t bytes, bool stream) {
  if (stream) {
    StreamCopy(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

void ReduceOut(ReduceFn reduce, char* to, const void** sources, uint32_t n, size_t bytes, size_t unit, bool stream) {
  if (!stream) {
    reduce(to, sources, n, bytes / unit);
    return;
  }
  alignas(64) char block[kStreamBlock];
  for (size_t at = 0; at < bytes; at += kStreamBlock) {
    const size_t part = std::min(kStreamBlock, bytes - at);
    reduce(block, sources, n, part / unit);
    StreamCopy(to + at, block, part);
    for (uint32_t r = 0; r < n; r++) sources[r] = At(sources[r], kStreamBlock);
  }
}

// Copies the next `bytes` of what this rank brings into `slot`; for a scatter, of each rank's part, `stride` apart.
void Stage(const Operation& operation, uint32_t size, Cursor& cursor, size_t bytes, char* slot, size_t stride,
           bool stream) {
  cursor.Take(bytes, [&](const kf_tensor& tensor, size_t offset, size_t at, size_t n) {
    if (operation.kind != Kind::kReduceScatter) {
      CopyOut(slot + at, At(tensor.input, offset), n, stream);
      return;
    }
    const size_t part = tensor.count / size * SizeOf(operation.dtype);
    for (uint32_t r = 0; r < size; r++) CopyOut(slot + r * stride + at, At(tensor.input, r * part + offset), n, stream);
  });
}

// Produces the next `bytes` of this rank's output from what all ranks have staged.
void Consume(const Operation& operation, uint32_t rank, uint32_t size, Cursor& cursor, size_t bytes,
             const char* const* slots, size_t stride, bool stream) {
  const size_t unit = SizeOf(operation.dtype);
  const void* sources[shm::kMaxRanks];
  cursor.Take(bytes, [&](const kf_tensor& tensor, size_t offset, size_t at, size_t n) {
    switch (operation.kind) {
      case Kind::kAllReduce:
      case Kind::kReduceScatter: {
        const size_t mine = operation.kind == Kind::kReduceScatter ? rank * stride : 0;
        for (uint32_t r = 0; r < size; r++) sources[r] = slots[r] + mine + at;
        // Its own it reads where the caller has it, which costs no trip to the slot and is as often in the cache.
        const size_t own = operation.kind == Kind::kReduceScatter ? rank * (tensor.count / size * unit) : 0;
        sources[rank] = At(tensor.input, own + offset);
        ReduceOut(ReductionFor(operation.dtype, operation.op), At(tensor.output, offset), sources, size, n, unit,
                  stream);
        break;
      }
      case Kind::kAllGather:
        for (uint32_t r = 0; r < size; r++) {
          CopyOut(At(tensor.output, r * tensor.count * unit + offset), slots[r] + at, n, stream);
        }
        break;
      case Kind::kBroadcast:
        if (rank != operation.root) {
          CopyOut(At(tensor.output, offset), slots[operation.root] + at, n, stream);
        } else if (tensor.output != nullptr) {
          Copy(At(tensor.output, offset), At(tensor.input, offset), n);
        }
        break;
      case Kind::kBarrier:
        break;
    }
  });
}

}  // namespace

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kBarrier:
      return "barrier";
  }
  return "?";
}

// An operation under way at this rank.
struct Communicator::Flight {
  Flight(const Operation& op, const Channel& use, uint32_t size, bool oversubscribed)
      : operation(op),
        channel(use.index),
        sequence(use.sequence + 1),
        signature(SignatureOf(op)),
        count(CountOf(op)),
        unit(SizeOf(op.dtype)),
        parts(op.kind == Kind::kReduceScatter ? size : 1),
        part_bytes(count * unit / parts),
        whole(oversubscribed && part_bytes * parts <= kWholeBytes),
        splits(op.kind == Kind::kAllReduce && size >= kSplitRanks && !whole && part_bytes > shm::kSlotBytes),
        chunk_bytes((whole ? shm::kSlots : 1) * shm::kSlotBytes / parts / shm::kLine * shm::kLine),
        chunks(static_cast<uint32_t>((part_bytes + chunk_bytes - 1) / chunk_bytes)) {}

  bool Brings(uint32_t rank) const { return operation.kind != Kind::kBroadcast || operation.root == rank; }
  // The slot that chunk `chunk` goes into, where the lane's counters stand at `base`.
  uint32_t SlotOf(uint32_t base, uint32_t chunk) const { return whole ? 0 : base + chunk; }
  // Bytes that this rank reads from another one's part of the segment, where that one brings something.
  uint64_t ReadFromEach(uint32_t size) const { return splits ? 2 * part_bytes / size : part_bytes; }
  size_t BytesOf(uint32_t chunk) const { return std::min(chunk_bytes, part_bytes - chunk * chunk_bytes); }

  const Operation& operation;
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
  bool streamed = false;                           // chunks are staged past the caches
  std::chrono::steady_clock::time_point agreed{};  // when all ranks had come, for operations in chunks
  // Of the whole operation, from its first wait that is more than a spin on: most never read the clock.
  std::chrono::steady_clock::time_point deadline{};
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
      channels_(std::make_unique<ChannelTable>(*segment_, rank)) {
  if (rank >= size_) throw Error(KF_INVALID, Text("no rank ", rank, " in a cluster of ", size_));
  shm::RankStatus& mine = segment_->status(rank_);
  const auto state = mine.state.value.load();
  if (state != static_cast<uint32_t>(shm::RankState::kAbsent)) {
    throw Error(KF_INTERNAL,
                Text("rank ", rank, " of cluster version ", cluster_version_, " is taken (state ", state, ")"));
  }
  mine.has_state = has_state ? 1 : 0;
  CopyText(mine.address, address);
  mine.state.Set(static_cast<uint32_t>(shm::RankState::kAttached));
}

Communicator::~Communicator() = default;

void Communicator::Assemble() {
  if (segment_ == nullptr) return;
  const auto deadline = std::chrono::steady_clock::now() + options_.join_timeout;
  const auto attached = static_cast<uint32_t>(shm::RankState::kAttached);
  Operation joining;
  joining.name = "join";
  for (uint32_t r = 0; r < size_; r++) {
    shm::Counter& state = segment_->status(r).state;
    while (!state.Reached(attached)) {
      ThrowIfClosed();
      ThrowIfLost(joining);
      if (std::chrono::steady_clock::now() > deadline) {
        throw Error(KF_TIMEOUT,
                    Text("cluster version ", cluster_version_, " has not assembled within ",
                         options_.join_timeout.count() / 1000.0, " s: rank ", r, " of ", size_, " has not come"));
      }
      state.Sleep(attached, kSlice);
    }
  }
  ThrowIfLost(joining);
}

uint64_t Communicator::announced() const {
  return segment_ == nullptr ? cluster_version_ : segment_->header().announced.load(std::memory_order_acquire);
}

uint32_t Communicator::StateRoot() const {
  if (segment_ == nullptr) return 0;
  for (uint32_t r = 0; r < size_; r++) {
    if (segment_->status(r).has_state != 0) return r;
  }
  return size_;
}

void Communicator::Close(kf_status status, const std::string& reason) {
  std::lock_guard<std::mutex> guard(close_mutex_);
  if (close_status_ != KF_OK) return;
  close_status_ = status;
  close_reason_ = reason;
  closed_.store(true, std::memory_order_release);
}

void Communicator::Leave() {
  if (segment_ == nullptr) return;
  shm::Counter& state = segment_->status(rank_).state;
  const auto left = static_cast<uint32_t>(shm::RankState::kLeft);
  if (!state.Reached(left)) state.Set(left);
}

void Communicator::Run(const Operation& operation) {
  ThrowIfClosed();
  Validate(operation);
  monitoring::GradientNorms::Scope norms(operation);
  if (segment_ == nullptr || size_ == 1) {
    RunAlone(operation);
  } else {
    RunShared(operation);
  }
  norms.Done(size_);
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

void Communicator::RunShared(const Operation& operation) {
  const uint64_t began = monitoring::Ticks();
  ChannelTable::Use use = channels_->Acquire(operation.name);
  Flight flight(operation, *use.channel, size_, oversubscribed_);
  try {
    if (flight.count * flight.unit <= shm::kInlineBytes || flight.chunks <= 1) {
      RunOnce(flight);
    } else {
      RunChunks(flight);
    }
  } catch (const Error& error) {
    if (error.status() != KF_MISMATCH) {
      Abort(error);
      throw;
    }
    use.channel->sequence++;
    throw;
  } catch (const std::exception& error) {
    Abort(Error(KF_INTERNAL, error.what()));
    throw;
  }
  use.channel->sequence++;
  const uint64_t bytes = flight.count * flight.unit;
  const bool receives = operation.kind != Kind::kBroadcast || operation.root != rank_;
  monitoring::Traffic::Get().Count(began, flight.Brings(rank_) ? bytes : 0, receives ? flight.ReadFromEach(size_) : 0,
                                   operation.kind == Kind::kBroadcast ? static_cast<int>(operation.root) : -1);
}

// Everything that this rank brings is in place before its post: whoever has seen all posts has all he needs.
void Communicator::RunOnce(Flight& flight) {
  const Operation& operation = flight.operation;
  const bool inlined = flight.count * flight.unit <= shm::kInlineBytes;
  shm::Post& mine = PreparePost(flight);
  uint32_t lane = 0, chunk = 0;
  if (!inlined) {
    lane = BindLane(flight);
    chunk = flight.SlotOf(segment_->done(lane, rank_).value.load(std::memory_order_relaxed), 0);
  }
  const auto payload = [&](uint32_t rank) {
    return inlined ? segment_->post(flight.channel, rank, flight.sequence).payload : segment_->slot(lane, rank, chunk);
  };
  const size_t stride = inlined ? flight.part_bytes : flight.chunk_bytes;
  if (flight.Brings(rank_)) {
    const bool stream = !inlined && flight.part_bytes >= kStreamOnce;
    Cursor input(operation, flight.parts);
    Stage(operation, size_, input, flight.part_bytes, payload(rank_), stride, stream);
    if (stream) StreamFence();
  }
  mine.sequence.Set(flight.sequence);
  AwaitPosts(flight);
  const char* payloads[shm::kMaxRanks];
  for (uint32_t r = 0; r < size_; r++) payloads[r] = payload(r);
  Cursor output(operation, flight.parts);
  Consume(operation, rank_, size_, output, flight.part_bytes, payloads, stride, /*stream=*/false);
  if (!inlined) LeaveLane(flight, /*failed=*/false);
}

void Communicator::RunChunks(Flight& flight) {
  // Kinds apart, and sizes by powers of four: what fits a cache behaves otherwise than what doesn't.
  const uint32_t magnitude = std::min<uint32_t>(5, (31 - __builtin_clz(flight.chunks)) / 2);
  const uint32_t history = static_cast<uint32_t>(flight.operation.kind) * 6 + magnitude;
  const StagingChoice::Choice choice = staging_choice_.Next(history);
  flight.streamed = choice.streamed;
  if (flight.splits) {
    RunSplit(flight);
  } else {
    RunPipelined(flight);
  }
  const std::chrono::duration<float, std::nano> took = std::chrono::steady_clock::now() - flight.agreed;
  staging_choice_.Record(history, choice, took.count() / static_cast<float>(flight.part_bytes));
}

// Chunk by chunk: stages what comes next, while the others' part of the present one arrives.
void Communicator::RunPipelined(Flight& flight) {
  const Operation& operation = flight.operation;
  PreparePost(flight).sequence.Set(flight.sequence);
  const uint32_t lane = BindLane(flight);
  shm::Counter& ready = segment_->ready(lane, rank_);
  shm::Counter& done = segment_->done(lane, rank_);
  const uint32_t base = done.value.load(std::memory_order_relaxed);

  const bool stream = flight.part_bytes >= kStreamBytes;
  Cursor input(operation, flight.parts);
  Cursor output(operation, flight.parts);
  const uint32_t to_stage = flight.Brings(rank_) ? flight.chunks : 0;
  uint32_t staged = 0;
  for (; staged < std::min(to_stage, ahead_); staged++) StageChunk(flight, lane, base, staged, input);
  AwaitPosts(flight);
  flight.agreed = std::chrono::steady_clock::now();
  const char* slots[shm::kMaxRanks];
  for (uint32_t chunk = 0; chunk < flight.chunks; chunk++) {
    for (uint32_t r = 0; r < size_; r++) {
      if (r != rank_ && flight.Brings(r)) Await(segment_->ready(lane, r), base + chunk + 1, r, flight);
      slots[r] = segment_->slot(lane, r, base + chunk);
    }
    char* slot = nullptr;
    size_t staging = 0;
    if (staged < to_stage) {
      AwaitRoom(flight, lane, base, staged);
      slot = segment_->slot(lane, rank_, base + staged);
      staging = flight.BytesOf(staged);
    }
    const size_t consuming = flight.BytesOf(chunk);
    for (size_t at = 0; at < std::max(staging, consuming); at += kBlend) {
      if (at < staging) {
        Stage(operation, size_, input, std::min(kBlend, staging - at), slot + at, flight.chunk_bytes, flight.streamed);
      }
      if (at < consuming) {
        const size_t bytes = std::min(kBlend, consuming - at);
        Consume(operation, rank_, size_, output, bytes, slots, flight.chunk_bytes, stream);
        for (uint32_t r = 0; r < size_; r++) slots[r] += bytes;
      }
    }
    if (stream || flight.streamed) StreamFence();
    if (staging > 0) ready.Set(base + ++staged);
    done.Set(base + chunk + 1);
  }
  if (!flight.Brings(rank_)) ready.Set(base + flight.chunks);
  LeaveLane(flight, /*failed=*/false);
}

// An all-reduce in which each rank reduces one part of every chunk, in place in its own slot: nobody else reads that
// part of it. With n ranks each reads its n parts and then the n reduced ones, where it would read n whole chunks
// otherwise.
void Communicator::RunSplit(Flight& flight) {
  const Operation& operation = flight.operation;
  PreparePost(flight).sequence.Set(flight.sequence);
  const uint32_t lane = BindLane(flight);
  shm::Counter& reduced = segment_->reduced(lane, rank_);
  shm::Counter& done = segment_->done(lane, rank_);
  const uint32_t base = done.value.load(std::memory_order_relaxed);
  const uint32_t base_reduced = reduced.value.load(std::memory_order_relaxed);

  const ReduceFn reduce = ReductionFor(operation.dtype, operation.op);
  const bool stream = flight.part_bytes >= kStreamBytes;
  Cursor input(operation);
  Cursor output(operation);
  // Part `rank` of a chunk of `bytes`: where it begins. Parts are whole cache lines, but for the end.
  const auto part_begin = [&](uint32_t rank, size_t bytes) {
    const size_t part = (bytes / size_ + shm::kLine) / shm::kLine * shm::kLine;
    return std::min(bytes, rank * part);
  };
  const auto gather = [&](uint32_t chunk) {
    const size_t bytes = flight.BytesOf(chunk);
    for (uint32_t r = 0; r < size_; r++) {
      if (r != rank_) Await(segment_->reduced(lane, r), base_reduced + chunk + 1, r, flight);
      const size_t begin = part_begin(r, bytes);
      const char* part = segment_->slot(lane, r, flight.SlotOf(base, chunk)) + begin;
      output.Take(part_begin(r + 1, bytes) - begin, [&](const kf_tensor& tensor, size_t offset, size_t at, size_t n) {
        CopyOut(At(tensor.output, offset), part + at, n, stream);
      });
    }
    if (stream) StreamFence();
    done.Set(base + chunk + 1);
  };

  uint32_t staged = 0;
  for (uint32_t chunk = 0; chunk < flight.chunks; chunk++) {
    // One chunk less ahead than there is room for: the chunk before this one is gathered after this one is reduced.
    for (; staged < flight.chunks && staged <= chunk + std::min(ahead_, shm::kSlots - 2); staged++) {
      StageChunk(flight, lane, base, staged, input);
    }
    if (chunk == 0) {
      AwaitPosts(flight);
      flight.agreed = std::chrono::steady_clock::now();
    }
    const size_t begin = part_begin(rank_, flight.BytesOf(chunk));
    const size_t end = part_begin(rank_ + 1, flight.BytesOf(chunk));
    const void* sources[shm::kMaxRanks];
    for (uint32_t r = 0; r < size_; r++) {
      if (r != rank_) Await(segment_->ready(lane, r), base + chunk + 1, r, flight);
      sources[r] = segment_->slot(lane, r, flight.SlotOf(base, chunk)) + begin;
    }
    ReduceOut(reduce, segment_->slot(lane, rank_, flight.SlotOf(base, chunk)) + begin, sources, size_, end - begin,
              flight.unit, flight.streamed);
    if (flight.streamed) StreamFence();
    reduced.Set(base_reduced + chunk + 1);
    if (chunk > 0) gather(chunk - 1);
  }
  gather(flight.chunks - 1);
  LeaveLane(flight, /*failed=*/false);
}

// Waits until nobody reads any more what was in this rank's slot for `chunk`.
void Communicator::AwaitRoom(Flight& flight, uint32_t lane, uint32_t base, uint32_t chunk) {
  if (chunk < shm::kSlots) return;
  for (uint32_t r = 0; r < size_; r++) {
    if (r != rank_) Await(segment_->done(lane, r), base + chunk - shm::kSlots + 1, r, flight);
  }
}

shm::Post& Communicator::PreparePost(const Flight& flight) {
  shm::Post& post = segment_->post(flight.channel, rank_, flight.sequence);
  post.signature = flight.signature;
  post.count = flight.count;
  return post;
}

// Copies chunk `chunk` of what this rank brings into its slot, once nobody reads what was there.
void Communicator::StageChunk(Flight& flight, uint32_t lane, uint32_t base, uint32_t chunk, Cursor& input) {
  AwaitRoom(flight, lane, base, chunk);
  Stage(flight.operation, size_, input, flight.BytesOf(chunk), segment_->slot(lane, rank_, flight.SlotOf(base, chunk)),
        flight.chunk_bytes, flight.streamed);
  if (flight.streamed) StreamFence();
  segment_->ready(lane, rank_).Set(base + chunk + 1);
}

void Communicator::AwaitPosts(Flight& flight) {
  bool equal = true;
  for (uint32_t r = 0; r < size_; r++) {
    if (r == rank_) continue;
    shm::Post& post = segment_->post(flight.channel, r, flight.sequence);
    Await(post.sequence, flight.sequence, r, flight);
    equal = equal && post.signature == flight.signature && post.count == flight.count;
  }
  if (!equal) ReportMismatch(flight);
}

// Every rank comes here for the same operation, because each has seen a post that differs from its own. The lane, if
// one was bound, is put back to its initial state by the last: some may have staged chunks into it already.
void Communicator::ReportMismatch(Flight& flight) {
  shm::Complaint& mine = segment_->complaint(flight.channel, rank_);
  CopyText(mine.text, Describe(flight.operation));
  mine.sequence.Set(flight.sequence);
  std::vector<std::pair<std::string, std::string>> brought;  // (what, ranks)
  for (uint32_t r = 0; r < size_; r++) {
    shm::Complaint& theirs = segment_->complaint(flight.channel, r);
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
  LeaveLane(flight, /*failed=*/true);
  throw Error(KF_MISMATCH, message);
}

uint32_t Communicator::BindLane(const Flight& flight) {
  std::atomic<uint64_t>& word = segment_->channel(flight.channel).lane[flight.sequence & 1];
  std::atomic<uint64_t>& lanes = segment_->header().lanes;
  uint64_t seen = word.load(std::memory_order_acquire);
  if (seen >> 32 == flight.sequence) return static_cast<uint32_t>(seen) - 1;
  uint64_t used = lanes.load(std::memory_order_relaxed);
  uint64_t bit = 0;
  do {
    bit = ~used & (used + 1);  // the lowest that is free
    if (bit == 0) throw Error(KF_INVALID, Text("more than ", shm::kLanes, " operations that need staging in flight"));
  } while (!lanes.compare_exchange_weak(used, used | bit, std::memory_order_acquire, std::memory_order_relaxed));
  const auto lane = static_cast<uint32_t>(__builtin_ctzll(bit));
  const uint64_t bound = static_cast<uint64_t>(flight.sequence) << 32 | (lane + 1);
  if (word.compare_exchange_strong(seen, bound, std::memory_order_acq_rel, std::memory_order_acquire)) return lane;
  lanes.fetch_and(~bit, std::memory_order_release);  // another rank was first
  return static_cast<uint32_t>(seen) - 1;
}

// `left` of this parity is next used two operations later, which nobody reaches before everybody has left this one.
void Communicator::LeaveLane(const Flight& flight, bool failed) {
  shm::ChannelHead& head = segment_->channel(flight.channel);
  std::atomic<uint32_t>& left = head.left[flight.sequence & 1];
  if (left.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return;
  left.store(0, std::memory_order_relaxed);
  const uint64_t bound = head.lane[flight.sequence & 1].load(std::memory_order_acquire);
  if (bound >> 32 != flight.sequence) return;  // a mismatch of operations that needed none
  const uint32_t lane = static_cast<uint32_t>(bound) - 1;
  if (failed) {
    for (uint32_t r = 0; r < size_; r++) {
      segment_->ready(lane, r).value.store(0, std::memory_order_relaxed);
      segment_->reduced(lane, r).value.store(0, std::memory_order_relaxed);
      segment_->done(lane, r).value.store(0, std::memory_order_relaxed);
    }
  }
  segment_->header().lanes.fetch_and(~(uint64_t{1} << lane), std::memory_order_release);
}

void Communicator::Await(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight) {
  if (!counter.Reached(target)) AwaitSlowly(counter, target, peer, flight);
}

void Communicator::AwaitSlowly(shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight) {
  using Clock = std::chrono::steady_clock;
  if (oversubscribed_) {
    for (const auto end = Clock::now() + kYieldTime; Clock::now() < end;) {
      sched_yield();
      if (counter.Reached(target)) return;
    }
  } else {
    for (int turn = 0; turn < kSpinTurns; turn++) {
      shm::Pause();
      if (counter.Reached(target)) return;
    }
  }
  if (flight.deadline == Clock::time_point{}) flight.deadline = Clock::now() + options_.collective_timeout;
  for (;;) {
    counter.Sleep(target, kSlice);
    if (counter.Reached(target)) return;
    LookAround(counter, target, peer, flight);
    if (Clock::now() > flight.deadline) {
      throw Error(KF_TIMEOUT, Text(NameOf(flight.operation.kind), " \"", flight.operation.name, "\": no data from ",
                                   PeerName(peer), " within ", options_.collective_timeout.count() / 1000.0,
                                   " s, cluster version ", cluster_version_));
    }
  }
}

void Communicator::LookAround(const shm::Counter& counter, uint32_t target, uint32_t peer, Flight& flight) {
  const Operation& operation = flight.operation;
  ThrowIfClosed();
  ThrowIfLost(operation);
  const shm::Header& header = segment_->header();
  if (header.abort.load(std::memory_order_acquire) == 2) {
    throw Error(static_cast<kf_status>(header.abort_status), header.abort_text);
  }
  const bool left = segment_->status(peer).state.Reached(static_cast<uint32_t>(shm::RankState::kLeft));
  // It may have brought its part and left right after.
  if (left && !counter.Reached(target)) {
    throw Error(KF_PEER_LOST, Text(NameOf(operation.kind), " \"", operation.name, "\": ", PeerName(peer),
                                   " has finished and left, cluster version ", cluster_version_));
  }
}

void Communicator::ThrowIfClosed() const {
  if (!closed_.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> guard(close_mutex_);
  throw Error(close_status_, close_reason_);
}

void Communicator::ThrowIfLost(const Operation& operation) const {
  if (segment_->header().lost.load(std::memory_order_acquire) == 0) return;
  std::string lost;
  for (uint32_t r = 0; r < size_; r++) {
    const shm::RankStatus& status = segment_->status(r);
    if (!status.state.Reached(static_cast<uint32_t>(shm::RankState::kLost))) continue;
    lost += Text(lost.empty() ? "" : ", ", PeerName(r), " ", status.lost_reason);
  }
  throw Error(KF_PEER_LOST, Text(NameOf(operation.kind), " \"", operation.name, "\": ", lost, ", cluster version ",
                                 cluster_version_));
}

// After a failure the ranks are at different places and this communicator is finished, here and at the others. The
// first to say so is believed; a rank that dies while it says it leaves `abort` at 1, and the others find out by
// themselves.
void Communicator::Abort(const Error& error) {
  Close(error.status(), error.what());
  shm::Header& header = segment_->header();
  uint32_t idle = 0;
  if (!header.abort.compare_exchange_strong(idle, 1, std::memory_order_acq_rel)) return;
  const bool own = error.status() == KF_INVALID || error.status() == KF_INTERNAL || error.status() == KF_STALE;
  header.abort_status = own ? KF_ABORTED : error.status();
  CopyText(header.abort_text, Text(PeerName(rank_), " gave up: ", error.what()));
  header.abort.store(2, std::memory_order_release);
}

std::string Communicator::PeerName(uint32_t rank) const {
  const shm::RankStatus& status = segment_->status(rank);
  const std::string address(status.address, strnlen(status.address, sizeof status.address));
  return address.empty() ? Text("rank ", rank) : Text("rank ", rank, " (", address, ")");
}

}  // namespace kungfu
