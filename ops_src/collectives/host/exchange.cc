// Exchanges data between the ranks of a host. Several files share the numbering of the invariants:
// see host_communicator.h.
//
// 1. A rank *posts* when it begins an operation. It takes the next sequence number k in the channel
// of the operation's name. It fills its mailbox for k with the signature, the count and, if the
// data is small enough, the payload. The comment on Mailbox explains why post k may overwrite post
// k-2.
// Test: Names.RandomSchedulesGiveRightSums
//
// 2. The rank waits for post k of all members, and compares these posts with its own. If two posts
// differ, each rank sees at least one post that differs from its own. So every rank throws a
// mismatch error, and no rank continues or hangs.
// Test: Mismatch.RaisesAtEveryRankWithTheRanksAndTheNextOperationWorks
//
// 3. The amount of data determines how the data is transferred:
// - Up to kInlineBytes: the data is in the mailbox. A rank waits only once.
// - One chunk: the data is in the rank's buffer before the rank posts. A rank waits only once. If
//   there are more ranks than cores, a chunk may fill all of the rank's buffers.
// - Several chunks, pipelined: when all other ranks are done with chunk c-kBuffers, a rank copies
//   chunk c into its buffer number c mod kBuffers. Then it advances its counter `ready`. When chunk
//   c of all ranks is ready, the rank reads these chunks, writes its output, and advances `done`. A
//   rank stages some chunks ahead of the chunk that it reads, so that it rarely waits.
// - Several chunks, split: for all-reduces with at least kSplitRanks ranks. (If there are more
//   ranks than cores, a smaller all-reduce is split too, as one chunk.) Between `ready` and `done`,
//   each rank reduces its part of chunk c, in place in its own buffer, and advances `reduced`. Then
//   it copies all parts to its output. It reduces chunk c+1 before it copies chunk c, so that the
//   other ranks have time to reduce chunk c.
// Test: AllReduce.CutsIntoChunksAnywhere
//
// There is no circular wait. In a pipeline, a rank at chunk c waits until the other ranks have
// staged chunk c. The other ranks stage chunk c when all ranks are done with chunk c-kBuffers. A
// rank reaches chunk c only after it is done with all earlier chunks. In a split, a rank stages at
// most kBuffers-2 chunks ahead of chunk c. Before that, all ranks must be done with chunk c-2.
// Every rank is done with chunk c-2 before it reaches chunk c.
//
// Each element is reduced in the order of the ranks, from rank 0 upwards, independently of the
// chunks. So the bits of the result depend only on the size and the inputs, and are equal on all
// ranks. In a split, the bits are equal because only one rank reduces each element.
#include "collectives/host/exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fault_point.h"

namespace kungfu::host {
namespace {

// The number of chunks that a rank stages ahead of the chunk that it reads. If there are more ranks
// than cores, each wait costs a context switch, so a rank stages as many chunks as fit.
constexpr uint32_t kAhead = 2;
constexpr uint32_t kAheadOversubscribed = shm::kBuffers - 1;
// A rank alternates between staging and reading, in pieces of this size. Staging uses the caller's
// memory, and reading uses the other ranks' caches, so alternating keeps more loads and stores in
// flight. The smaller size is for results that bypass the caches: two ranks then take 31 ms for 256
// MiB instead of 37 ms. The larger size is faster if all data is in the caches: 0.20 ms instead of
// 0.24 ms for 1 MiB.
constexpr size_t kBlend = 16 << 10;
constexpr size_t kBlendStreamed = 4 << 10;
// Data that is staged as one chunk bypasses the caches if it has at least this size. Stores that
// bypass the caches are as fast as plain stores if the ranks share a cache, and three times as fast
// if they don't. For several chunks, StagingChoice decides whether the data bypasses the caches.
constexpr size_t kStreamOnce = 4 << 10;
// Results of at least this size bypass the caches when they are written. A result of this size
// would be evicted from the caches before the program uses it.
constexpr size_t kStreamBytes = 8 << 20;
// The highest bits of a mailbox's count contain the rank's weight.
constexpr int kWeightShift = 64 - kWeightBits;
constexpr uint64_t kCountMask = (uint64_t{1} << kWeightShift) - 1;

}  // namespace

Exchange::Exchange(const Endpoint& self, const FailureRules& rules, const Waiting& waiting,
                   const StagingBuffers& staging_buffers)
    : self_(self),
      rules_(rules),
      waiting_(waiting),
      staging_buffers_(staging_buffers),
      ahead_(self.oversubscribed ? kAheadOversubscribed : kAhead) {}

void Exchange::Run(Flight& flight) {
  if (flight.AtOnce()) {
    RunAtOnce(flight);
    return;
  }
  // Each kind of operation has one history for each power of four of the number of chunks, because
  // data that fits in a cache behaves differently from larger data.
  const uint32_t magnitude = std::min<uint32_t>(5, (31 - __builtin_clz(flight.chunks)) / 2);
  const uint32_t history = static_cast<uint32_t>(flight.operation.kind) * 6 + magnitude;
  StagingTurns turns(staging_choice_, history, flight.chunks, flight.chunk_bytes, flight.part_bytes);
  if (flight.splits) {
    RunSplit(flight, turns);
  } else {
    RunPipelined(flight, turns);
  }
}

// Runs an operation whose data is a single chunk or fits in the mailbox. Each rank's data is in
// place before the rank posts. So a rank that has seen all posts has all the data that it needs.
void Exchange::RunAtOnce(Flight& flight) {
  const Operation& operation = flight.operation;
  shm::Mailbox& mine = FillMailbox(flight);
  uint32_t chunk = 0;
  if (!flight.inlined) {
    staging_buffers_.Bind(flight);
    chunk = flight.BufferOf(0);
  }
  const auto payload = [&](uint32_t rank) {
    return flight.inlined ? self_.segment.mailbox(flight.channel, rank, flight.sequence).payload
                          : self_.segment.buffer(flight.staging_buffer, rank, chunk);
  };
  const size_t stride = flight.inlined ? flight.part_bytes : flight.chunk_bytes;
  if (flight.Brings(self_.rank)) {
    const bool stream = !flight.inlined && flight.part_bytes >= kStreamOnce;
    Cursor input(operation, flight.parts);
    Stage(operation, self_.size, input, flight.part_bytes, payload(self_.rank), stride, stream);
    if (stream) StreamFence();
  }
  KUNGFU_FAULT_POINT("before the post");
  rules_.Publish(mine.sequence, flight.sequence);
  KUNGFU_FAULT_POINT("after the post");
  AwaitMailboxes(flight);
  if (flight.Reads(self_.rank) && !flight.StaysInStagingBuffer()) {
    const char* payloads[shm::kMaxRanks];
    for (size_t i = 0; i < flight.members.size(); i++) payloads[i] = payload(flight.members[i]);
    Cursor output(operation, flight.parts);
    Consume(operation, flight.reduce, flight.members, self_.rank, self_.size, output, flight.part_bytes, payloads,
            stride, /*stream=*/false);
  }
  End(flight);
}

// Runs an operation chunk by chunk. A rank stages the next chunk while the other ranks' data for
// the current chunk is still arriving.
void Exchange::RunPipelined(Flight& flight, StagingTurns& turns) {
  const Operation& operation = flight.operation;
  rules_.Publish(FillMailbox(flight).sequence, flight.sequence);
  KUNGFU_FAULT_POINT("after the post");
  staging_buffers_.Bind(flight);
  const uint32_t staging_buffer = flight.staging_buffer, base = flight.base;
  const Members& members = flight.members;
  shm::Counter& ready = self_.segment.ready(staging_buffer, self_.rank);
  shm::Counter& done = self_.segment.done(staging_buffer, self_.rank);

  const bool stream = flight.part_bytes >= kStreamBytes;
  const size_t blend = stream ? kBlendStreamed : kBlend;
  Cursor input(operation, flight.parts);
  Cursor output(operation, flight.parts);
  const uint32_t to_stage = flight.Brings(self_.rank) ? flight.chunks : 0;
  const bool reads = flight.Reads(self_.rank), consumes = reads && !flight.StaysInStagingBuffer();
  uint32_t staged = 0;
  turns.BeginStaging();
  for (; staged < std::min(to_stage, ahead_); staged++) StageChunk(flight, turns, staged, input);
  turns.EndStaging();
  AwaitMailboxes(flight);
  turns.BeginReading();
  const char* buffers[shm::kMaxRanks];
  for (uint32_t chunk = 0; chunk < flight.chunks; chunk++) {
    for (size_t i = 0; reads && i < members.size(); i++) {
      const uint32_t r = members[i];
      if (r != self_.rank && flight.Brings(r))
        waiting_.Await(self_.segment.ready(staging_buffer, r), base + chunk + 1, r, flight);
      buffers[i] = self_.segment.buffer(staging_buffer, r, flight.BufferOf(chunk));
    }
    char* buffer = nullptr;
    size_t staging = 0;
    bool past_caches = false;
    if (staged < to_stage) {
      AwaitRoom(flight, staged);
      buffer = self_.segment.buffer(staging_buffer, self_.rank, flight.BufferOf(staged));
      staging = flight.BytesOf(staged);
      past_caches = turns.Streams(staged);
    }
    const size_t consuming = consumes ? flight.BytesOf(chunk) : 0;
    for (size_t at = 0; at < std::max(staging, consuming); at += blend) {
      if (at < staging) {
        Stage(operation, self_.size, input, std::min(blend, staging - at), buffer + at, flight.chunk_bytes,
              past_caches);
      }
      if (at < consuming) {
        const size_t bytes = std::min(blend, consuming - at);
        Consume(operation, flight.reduce, members, self_.rank, self_.size, output, bytes, buffers, flight.chunk_bytes,
                stream);
        for (size_t i = 0; i < members.size(); i++) buffers[i] += bytes;
      }
    }
    if (stream || past_caches) StreamFence();
    KUNGFU_FAULT_POINT("before a chunk is done");
    if (staging > 0) rules_.Publish(ready, base + ++staged);
    KUNGFU_FAULT_POINT("between ready and done");
    rules_.Publish(done, base + chunk + 1);
    turns.HaveRead(chunk + 1);
  }
  if (!flight.Brings(self_.rank)) rules_.Publish(ready, base + flight.chunks);
  // By invariant 6, even a rank that reads no data waits until all members have finished their
  // contributions.
  for (const uint32_t r : members) {
    if (!reads && r != self_.rank && flight.Brings(r)) {
      waiting_.Await(self_.segment.ready(staging_buffer, r), base + flight.chunks, r, flight);
    }
  }
  End(flight);
}

// Runs an all-reduce in which each rank reduces one part of every chunk, in place in its own
// buffer. No other rank reads this part of the buffer before it is reduced. With n ranks, each rank
// reads n unreduced parts and n reduced parts, instead of n whole chunks.
void Exchange::RunSplit(Flight& flight, StagingTurns& turns) {
  const Operation& operation = flight.operation;
  rules_.Publish(FillMailbox(flight).sequence, flight.sequence);
  KUNGFU_FAULT_POINT("after the post");
  staging_buffers_.Bind(flight);
  const uint32_t staging_buffer = flight.staging_buffer, base = flight.base, base_reduced = flight.base_reduced;
  const Members& members = flight.members;
  const auto num = static_cast<uint32_t>(members.size());
  const auto me = static_cast<uint32_t>(std::find(members.begin(), members.end(), self_.rank) - members.begin());
  shm::Counter& reduced = self_.segment.reduced(staging_buffer, self_.rank);
  shm::Counter& done = self_.segment.done(staging_buffer, self_.rank);

  const bool stream = flight.part_bytes >= kStreamBytes;
  Cursor input(operation);
  Cursor output(operation);
  // Returns the offset of the part of `members[i]` in a chunk of `bytes` bytes. All parts except
  // the last one consist of whole cache lines.
  const auto part_begin = [&](uint32_t i, size_t bytes) {
    const size_t part = (bytes / num + shm::kLine) / shm::kLine * shm::kLine;
    return std::min(bytes, i * part);
  };
  const auto gather = [&](uint32_t chunk) {
    const size_t bytes = flight.BytesOf(chunk);
    for (uint32_t i = 0; i < num; i++) {
      const uint32_t r = members[i];
      if (r != self_.rank)
        waiting_.Await(self_.segment.reduced(staging_buffer, r), base_reduced + chunk + 1, r, flight);
      const size_t begin = part_begin(i, bytes);
      const char* part = self_.segment.buffer(staging_buffer, r, flight.BufferOf(chunk)) + begin;
      output.Take(part_begin(i + 1, bytes) - begin, [&](const kf_tensor& tensor, size_t offset, size_t at, size_t n) {
        CopyOut(At(tensor.output, offset), part + at, n, stream);
      });
    }
    if (stream) StreamFence();
    KUNGFU_FAULT_POINT("before a chunk is done");
    rules_.Publish(done, base + chunk + 1);
    turns.HaveRead(chunk + 1);
  };

  std::optional<PlaneSources> plane_sources;
  if (operation.planes != nullptr) plane_sources.emplace(*operation.planes, members);
  uint32_t staged = 0;
  turns.BeginStaging();
  for (uint32_t chunk = 0; chunk < flight.chunks; chunk++) {
    // Stage one chunk less than the buffers can hold, because the previous chunk is gathered only
    // after the current chunk has been reduced.
    for (; staged < flight.chunks && staged <= chunk + std::min(ahead_, shm::kBuffers - 2); staged++) {
      StageChunk(flight, turns, staged, input);
    }
    if (chunk == 0) {
      turns.EndStaging();
      AwaitMailboxes(flight);
      turns.BeginReading();
    }
    const size_t begin = part_begin(me, flight.BytesOf(chunk));
    const size_t end = part_begin(me + 1, flight.BytesOf(chunk));
    const void* sources[shm::kMaxRanks];
    const char* buffers[shm::kMaxRanks];
    for (uint32_t i = 0; i < num; i++) {
      const uint32_t r = members[i];
      if (r != self_.rank) waiting_.Await(self_.segment.ready(staging_buffer, r), base + chunk + 1, r, flight);
      buffers[i] = self_.segment.buffer(staging_buffer, r, flight.BufferOf(chunk));
      sources[i] = buffers[i] + begin;
    }
    const bool past_caches = turns.Streams(chunk);
    char* const mine = self_.segment.buffer(staging_buffer, self_.rank, flight.BufferOf(chunk)) + begin;
    const auto own = [&](uint32_t p) { return mine + p * flight.chunk_bytes; };
    flight.reduce(mine,
                  plane_sources ? plane_sources->Gather(buffers, begin, flight.chunk_bytes, self_.rank, own) : sources,
                  num, end - begin, past_caches);
    if (past_caches) StreamFence();
    KUNGFU_FAULT_POINT("before a chunk is reduced");
    rules_.Publish(reduced, base_reduced + chunk + 1);
    KUNGFU_FAULT_POINT("after a chunk is reduced");
    if (chunk > 0) gather(chunk - 1);
  }
  gather(flight.chunks - 1);
  End(flight);
}

// Leaves the operation. If the staging buffer is pinned, the rank leaves later, when it releases
// the buffer.
void Exchange::End(const Flight& flight) const {
  KUNGFU_FAULT_POINT("before it leaves");
  if (!flight.inlined && !flight.pinned) staging_buffers_.Leave(flight, /*failed=*/false);
}

// Waits until every running rank has read the previous contents of this rank's buffer for `chunk`.
void Exchange::AwaitRoom(Flight& flight, uint32_t chunk) {
  if (chunk < shm::kBuffers) return;
  for (const uint32_t r : flight.members) {
    if (r == self_.rank) continue;
    waiting_.Await(self_.segment.done(flight.staging_buffer, r), flight.base + chunk - shm::kBuffers + 1, r, flight,
                   /*or_failed=*/true);
  }
}

shm::Mailbox& Exchange::FillMailbox(const Flight& flight) {
  shm::Mailbox& mailbox = self_.segment.mailbox(flight.channel, self_.rank, flight.sequence);
  mailbox.signature = flight.signature;
  mailbox.count = flight.count | static_cast<uint64_t>(flight.operation.weighting.own) << kWeightShift;
  return mailbox;
}

// Waits until the buffer for `chunk` is free. Then copies this rank's chunk number `chunk` into it.
void Exchange::StageChunk(Flight& flight, StagingTurns& turns, uint32_t chunk, Cursor& input) {
  AwaitRoom(flight, chunk);
  const bool past_caches = turns.Streams(chunk);
  Stage(flight.operation, self_.size, input, flight.BytesOf(chunk),
        self_.segment.buffer(flight.staging_buffer, self_.rank, flight.BufferOf(chunk)), flight.chunk_bytes,
        past_caches);
  if (past_caches) StreamFence();
  KUNGFU_FAULT_POINT("before a chunk is ready");
  rules_.Publish(self_.segment.ready(flight.staging_buffer, self_.rank), flight.base + chunk + 1);
}

void Exchange::AwaitMailboxes(Flight& flight) {
  bool equal = true;
  for (const uint32_t r : flight.members) {
    if (r == self_.rank) continue;
    shm::Mailbox& mailbox = self_.segment.mailbox(flight.channel, r, flight.sequence);
    waiting_.Await(mailbox.sequence, flight.sequence, r, flight);
    equal = equal && mailbox.signature == flight.signature && (mailbox.count & kCountMask) == flight.count;
  }
  if (!equal) {
    flight.differs = true;
    ReportMismatch(flight);
  }
  if (!flight.operation.weighting.applies) return;
  std::vector<uint32_t> weights;
  for (const uint32_t r : flight.members) {
    const shm::Mailbox& mailbox = self_.segment.mailbox(flight.channel, r, flight.sequence);
    weights.push_back(flight.Brings(r) ? static_cast<uint32_t>(mailbox.count >> kWeightShift) : 0);
  }
  if (flight.operation.weighting.total != nullptr) {
    *flight.operation.weighting.total = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
  }
  if (IsToRoot(flight.operation.kind)) weights.pop_back();  // the root is the last member, and it contributes nothing
  flight.reduce.Weigh(flight.operation, weights);
}

// Throws a mismatch error that describes each rank's operation. Every rank calls this function in
// the same operation, because each rank has seen a post that differs from its own. There is one
// exception: if a rank failed before it wrote its complaint, all ranks leave the operation instead.
// The last rank that leaves resets a bound staging buffer, because some ranks may already have
// staged chunks.
void Exchange::ReportMismatch(Flight& flight) {
  shm::Complaint& mine = self_.segment.complaint(flight.channel, self_.rank);
  CopyText(mine.text, Describe(flight.operation));
  KUNGFU_FAULT_POINT("before a complaint");
  rules_.Publish(mine.sequence, flight.sequence);
  KUNGFU_FAULT_POINT("after a complaint");
  std::vector<std::pair<std::string, std::string>> brought;  // (ranks, what)
  for (const uint32_t r : flight.members) {
    shm::Complaint& theirs = self_.segment.complaint(flight.channel, r);
    // This wait throws if the rank failed before it wrote its complaint. Without the failed rank,
    // there may be no mismatch.
    waiting_.Await(theirs.sequence, flight.sequence, r, flight);
    if (!self_.control.IsWorker(r)) continue;  // the transport only repeats what one of the ranks has contributed
    const std::string what = TextOf(theirs.text);
    const auto same = std::find_if(brought.begin(), brought.end(), [&](const auto& b) { return b.second == what; });
    if (same == brought.end()) {
      brought.emplace_back(Text("rank ", self_.control.NumberOf(r)), what);
    } else {
      same->first += Text(", ", self_.control.NumberOf(r));
    }
  }
  const std::string message = MismatchText("ranks", flight.operation.name, brought);
  KUNGFU_FAULT_POINT("before it leaves");
  staging_buffers_.Leave(flight, /*failed=*/true);
  throw FailedEverywhere(KF_MISMATCH, message);
}

}  // namespace kungfu::host
