// Algorithms for all-reduces between hosts. Each host contributes one set of data. Each host
// exchanges messages on the thread that calls Algorithm::Run.
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

// The arguments of an all-reduce: out[i] becomes the reduction of in[i] over all hosts. `in` and
// `out` may be the same memory. KF_MEAN is rejected. For a mean, the caller must scale the inputs
// and request a sum.
struct AllReduceCall {
  const Group& group;
  const tcp::Tag& tag;
  kf_dtype dtype;
  kf_op op;
  const void* in;
  void* out;
  size_t count;
};

// The numbers of hosts and of bytes that an algorithm accepts.
struct Range {
  uint32_t least_hosts;
  uint64_t most_bytes;

  bool Has(uint32_t hosts, uint64_t bytes) const { return hosts >= least_hosts && bytes <= most_bytes; }
};

// The cost of an all-reduce: the number of consecutive messages, and the number of bytes that go
// through one host's network interface (that of a leaf, if the algorithm uses trees).
struct Cost {
  uint64_t steps, bytes;
};

// An algorithm for all-reduces between hosts. The bits of the result are equal on all hosts. These
// bits depend only on the algorithm, the inputs, the order and number of the hosts, and `count`.
// 16-bit floats are rounded after each reduction of two values.
class Algorithm {
 public:
  virtual ~Algorithm() = default;

  virtual const char* name() const = 0;
  virtual Range range() const = 0;
  virtual Cost CostOf(uint32_t hosts, uint64_t bytes) const = 0;

  // Runs an all-reduce. Every host of the group must call it with the same algorithm, sizes and
  // tag. No other operation of the epoch may use this tag. Operations with different tags run
  // concurrently, in any order.
  //
  // Throws ValueError if the call is outside range(), and the errors that Mesh's functions throw.
  // If a host is lost, the waits for that host end. On another host, Run may have succeeded, or it
  // may be waiting for a host on which Run has thrown. Then Mesh::Cancel or a deadline ends the
  // wait. When Run throws, this host has no messages in flight, and its output may contain a part
  // of the result.
  void Run(const AllReduceCall& call) const;

 private:
  virtual void RunInRange(const AllReduceCall& call) const = 0;
};

// Recursive doubling, for small amounts of data. It takes log2(n) steps, and each step sends all
// bytes.
class Doubling final : public Algorithm {
 public:
  const char* name() const override { return "doubling"; }
  Range range() const override { return {1, UINT64_MAX}; }
  Cost CostOf(uint32_t hosts, uint64_t bytes) const override;

  // Computes the same result as Run, on a host that already has the data of all hosts. `parts`
  // contains this data in the order of the hosts. `out` must not be one of the parts.
  static void ReduceAlone(kf_dtype dtype, kf_op op, std::vector<const void*> parts, void* out, size_t count);

 private:
  void RunInRange(const AllReduceCall& call) const override;
};

// A ring, for large amounts of data. It takes 2 (n-1) steps, which transfer 2 (n-1)/n of the bytes.
class Ring final : public Algorithm {
 public:
  const char* name() const override { return "ring"; }
  Range range() const override { return {2, kMostPieces * kPieceBytes}; }
  Cost CostOf(uint32_t hosts, uint64_t bytes) const override;

 private:
  void RunInRange(const AllReduceCall& call) const override;
};

// Reduces data up a tree of hosts, and sends the result down the tree. Either a single tree reduces
// all elements, or each host is the root of a tree for a part of the elements.
class Trees final : public Algorithm {
 public:
  // `order` lists the hosts, beginning with the root of the first tree. If `order` is empty, the
  // hosts are in the order of their indices.
  Trees(Shape shape, bool around_each, Members order = {})
      : shape_(shape), around_each_(around_each), order_(std::move(order)) {}

  const char* name() const override { return around_each_ ? "trees" : "tree"; }
  Range range() const override { return {2, kMostPieces * kPieceBytes}; }
  Cost CostOf(uint32_t hosts, uint64_t bytes) const override;

  const Members& order() const { return order_; }

 private:
  void RunInRange(const AllReduceCall& call) const override;
  // Returns the branch of the host at `place`, in the tree whose root is host number `root` of the
  // order.
  Branch BranchIn(uint32_t hosts, uint32_t root, uint32_t place) const;

  const Shape shape_;
  const bool around_each_;
  const Members order_;
};

}  // namespace kungfu::hosts

#endif  // KUNGFU_COLLECTIVES_HOSTS_ALGORITHM_H_
