// What tests have in common whose ranks are processes that are killed.
#ifndef KUNGFU_TESTS_CPP_KILLED_RANKS_H_
#define KUNGFU_TESTS_CPP_KILLED_RANKS_H_

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

namespace kungfu::testing {

// The seed of what is tried and in what order: always 1, or KUNGFU_KILL_SEED (tests/campaigns).
inline unsigned Seed() {
  static const unsigned seed = [] {
    const char* const given = std::getenv("KUNGFU_KILL_SEED");
    const unsigned drawn = given != nullptr ? unsigned(std::strtoul(given, nullptr, 10)) : 1u;
    std::printf("KUNGFU_KILL_SEED=%u\n", drawn);
    return drawn;
  }();
  return seed;
}
inline bool Everywhere() { return std::getenv("KUNGFU_KILL_EVERYWHERE") != nullptr; }

// For the length of a test `control block` is memory that the processes which it forks share with it.
template <typename Results, Results*& results>
class KilledRanks : public ::testing::Test {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "it sees nothing of what passes between processes; threads run the same code in other tests";
#endif
    results = static_cast<Results*>(
        mmap(nullptr, sizeof(Results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  }
  void TearDown() override {
    if (results != nullptr) munmap(results, sizeof(Results));
    results = nullptr;
  }
};

}  // namespace kungfu::testing

#endif  // KUNGFU_TESTS_CPP_KILLED_RANKS_H_
