// A cluster over several hosts in one process: a link a host, and a thread a rank, over TCP on the loopback interface.
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
#include "collectives/hosts/link.h"
#include "hosts.h"
#include "transport/shm/board.h"

namespace kungfu::testing {

class Clusters {
 public:
  explicit Clusters(const std::vector<uint32_t>& host_of_rank, bool recovers = false,
                    CommunicatorOptions options = {std::chrono::seconds(60), std::chrono::seconds(60)},
                    hosts::Strategy strategy = hosts::Strategy::kAuto)
      : places_(host_of_rank) {
    Ends ends = Connect(places_.hosts(), 2);
    const auto make = [&](uint32_t size, bool board) {
      const int fd = shm::Segment::Create(size, /*cluster_version=*/7, /*cores=*/2, recovers, board);
      auto segment = std::make_shared<shm::Segment>(fd);
      close(fd);
      return segment;
    };
    for (uint32_t h = 0; h < places_.hosts(); h++) {
      local_.push_back(make(places_.SizeOf(h) + 1, false));
      everybody_.push_back(make(places_.ranks(), true));
      links_.push_back(
          std::make_unique<hosts::Link>(local_[h], everybody_[h], places_, h, std::move(ends[h]), strategy));
    }
    for (uint32_t r = 0; r < places_.ranks(); r++) {
      const uint32_t h = places_.HostOf(r);
      const int requests = links_[h]->Connect(places_.LocalOf(r));
      communicators_.push_back(std::make_unique<ClusterCommunicator>(local_[h], everybody_[h], requests, places_, r,
                                                                     HostName(h) + ":" + std::to_string(10000 + r),
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
  hosts::Link& link(uint32_t host) { return *links_[host]; }
  shm::Segment& segment(uint32_t host) { return *local_[host]; }
  void End(uint32_t host) { links_[host] = nullptr; }

  // What the launcher of `host` does when it hears of a death.
  void MarkLost(uint32_t host, uint32_t rank, bool recover = true) {
    shm::Board(everybody_[host]).MarkLost(rank, "was killed", recover, /*reaped=*/true);
    if (places_.HostOf(rank) == host) {
      shm::Board(local_[host]).MarkLost(places_.LocalOf(rank), "was killed", recover, /*reaped=*/true);
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
  std::vector<std::shared_ptr<shm::Segment>> local_, everybody_;
  std::vector<std::unique_ptr<hosts::Link>> links_;
  std::vector<std::unique_ptr<ClusterCommunicator>> communicators_;
};

}  // namespace kungfu::testing

#endif  // KUNGFU_TESTS_CPP_CLUSTERS_H_
