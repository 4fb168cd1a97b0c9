// A cluster over several hosts in one process: a transport a host, and a thread a rank, over TCP on the loopback
// interface.
#ifndef KUNGFU_TESTS_CPP_CLUSTERS_H_
#define KUNGFU_TESTS_CPP_CLUSTERS_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/hosts/cluster_communicator.h"
#include "collectives/hosts/transport.h"
#include "hosts.h"
#include "transport/shm/segment_control_block.h"

namespace kungfu::testing {

class Clusters {
 public:
  explicit Clusters(const std::vector<uint32_t>& host_of_rank, bool recovers = false,
                    CommunicatorOptions options = {std::chrono::seconds(60), std::chrono::seconds(60)},
                    hosts::Strategy strategy = hosts::Strategy::kAuto)
      : places_(host_of_rank) {
    Ends ends = Connect(places_.hosts(), 2);
    const auto make = [&](uint32_t size, bool control_block) {
      const int fd = shm::Segment::Create(size, /*cluster_version=*/7, /*cores=*/2, recovers, control_block);
      auto segment = std::make_shared<shm::Segment>(fd);
      close(fd);
      return segment;
    };
    for (uint32_t h = 0; h < places_.hosts(); h++) {
      local_.push_back(make(places_.SizeOf(h) + 1, false));
      control_segments_.push_back(make(places_.ranks(), true));
      transports_.push_back(std::make_unique<hosts::Transport>(local_[h], control_segments_[h], places_, h,
                                                               std::move(ends[h]), strategy));
    }
    for (uint32_t r = 0; r < places_.ranks(); r++) {
      const uint32_t h = places_.HostOf(r);
      const int requests = transports_[h]->Connect(places_.LocalOf(r));
      communicators_.push_back(std::make_unique<ClusterCommunicator>(local_[h], control_segments_[h], requests, places_,
                                                                     r, HostName(h) + ":" + std::to_string(10000 + r),
                                                                     /*has_state=*/r % 2 == 1, options));
      close(requests);
    }
    Run([&](uint32_t rank, ClusterCommunicator& communicator) {
      (void)rank;
      communicator.Assemble();
    });
  }

  const hosts::Places& places() const { return places_; }
  uint32_t size() const { return places_.ranks(); }
  ClusterCommunicator& at(uint32_t rank) { return *communicators_[rank]; }
  hosts::Transport& transport(uint32_t host) { return *transports_[host]; }
  shm::Segment& segment(uint32_t host) { return *local_[host]; }
  void End(uint32_t host) { transports_[host] = nullptr; }

  // What the launcher of `host` does when it hears of a failure.
  void MarkLost(uint32_t host, uint32_t rank, bool recover = true) {
    shm::SegmentControlBlock(control_segments_[host]).MarkLost(rank, "was killed", recover, /*reaped=*/true);
    if (places_.HostOf(rank) == host) {
      shm::SegmentControlBlock(local_[host]).MarkLost(places_.LocalOf(rank), "was killed", recover, /*reaped=*/true);
    }
  }
  void MarkLost(uint32_t rank) {
    for (uint32_t h = 0; h < places_.hosts(); h++) MarkLost(h, rank);
  }

  using Body = std::function<void(uint32_t rank, ClusterCommunicator& communicator)>;
  // Calls body on one thread a rank; rethrows what the lowest rank threw.
  void Run(const Body& body) { RethrowFirst(Collect(body)); }
  std::vector<std::exception_ptr> Collect(const Body& body) {
    return CollectOf(size(), [&](uint32_t r) { body(r, at(r)); });
  }

 private:
  const hosts::Places places_;
  std::vector<std::shared_ptr<shm::Segment>> local_, control_segments_;
  std::vector<std::unique_ptr<hosts::Transport>> transports_;
  std::vector<std::unique_ptr<ClusterCommunicator>> communicators_;
};

}  // namespace kungfu::testing

#endif  // KUNGFU_TESTS_CPP_CLUSTERS_H_
