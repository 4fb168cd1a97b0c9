// All-reduces between hosts, of which each brings one part: over messages, on the caller's thread.
#ifndef KUNGFU_COLLECTIVES_HOSTS_ALGORITHM_H_
#define KUNGFU_COLLECTIVES_HOSTS_ALGORITHM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/hosts/group.h"
#include "collectives/hosts/pieces.h"
#include "collectives/hosts/tree_shape.h"

namespace kungfu::hosts {

// out[i] = in[i] of all hosts, reduced; in == out is in place. A mean is refused: it is a sum that the caller divides
// once, at the end.
struct AllReduceCall {
  const Group& group;
  const tcp::Tag& tag;
  kf_dtype dtype;
  kf_op op;
  const void* in;
  void* out;
  size_t count;
};

// Where an algorithm can be run.
struct Range {
  uint32_t least_hosts;
  uint64_t most_bytes;

  bool Has(uint32_t hosts, uint64_t bytes) const { return hosts >= least_hosts && bytes <= most_bytes; }
};

// What an all-reduce costs: messages one after another, and bytes through a host's cable (of trees: the leaves').
struct Cost {
  uint64_t steps, bytes;
};

// The bits are the same at every host. They are a function of the algorithm, the inputs, the hosts' order and number,
// and `count`. 16-bit floats are rounded whenever two parts come together.
class Algorithm {
 public:
  virtual ~Algorithm() = default;

  virtual const char* name() const = 0;
  virtual Range range() const = 0;
  virtual Cost CostOf(uint32_t hosts, uint64_t bytes) const = 0;

  // Every host of the group calls it with the same algorithm, sizes and tag. No other operation of the epoch has the
  // tag; those with other tags run side by side, in any order.
  //
  // Throws ValueError outside of the range, and what Mesh's calls throw. The loss of a host ends the waits for that
  // host. Other hosts may have succeeded, or wait for a host that has thrown, until Mesh::Cancel or their deadlines end
  // that. A host that throws has nothing under way any more, and part of the result in its output.
  void Run(const AllReduceCall& call) const;

 private:
  virtual void RunInRange(const AllReduceCall& call) const = 0;
};

// For few bytes: log2(n) steps, each with all of them.
class Doubling final : public Algorithm {
 public:
  const char* name() const override { return "doubling"; }
  Range range() const override { return {1, UINT64_MAX}; }
  Cost CostOf(uint32_t hosts, uint64_t bytes) const override;

  // The result if these are what the hosts bring, by place; for one that has them all. `out` is none of them.
  static void ReduceAlone(kf_dtype dtype, kf_op op, std::vector<const void*> parts, void* out, size_t count);

 private:
  void RunInRange(const AllReduceCall& call) const override;
};

// For many bytes: 2 (n-1) steps, and 2 (n-1)/n of the bytes.
class Ring final : public Algorithm {
 public:
  const char* name() const override { return "ring"; }
  Range range() const override { return {2, kMostPieces * kPieceBytes}; }
  Cost CostOf(uint32_t hosts, uint64_t bytes) const override;

 private:
  void RunInRange(const AllReduceCall& call) const override;
};

// Up a tree of hosts and down again: around one host, or around each host with a part of the elements.
class Trees final : public Algorithm {
 public:
  // `order`: the hosts, from the first tree's root on; empty: as they are counted.
  Trees(Shape shape, bool around_each, Members order = {})
      : shape_(shape), around_each_(around_each), order_(std::move(order)) {}

  const char* name() const override { return around_each_ ? "trees" : "tree"; }
  Range range() const override { return {2, kMostPieces * kPieceBytes}; }
  Cost CostOf(uint32_t hosts, uint64_t bytes) const override;

  const Members& order() const { return order_; }

 private:
  void RunInRange(const AllReduceCall& call) const override;
  // Of the host at this place, in the tree around the `root`-th host.
  Branch BranchIn(uint32_t hosts, uint32_t root, uint32_t place) const;

  const Shape shape_;
  const bool around_each_;
  const Members order_;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_ALGORITHM_H_
