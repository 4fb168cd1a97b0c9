// Ranks or hosts of a test, each on a thread, and a wait for what they do.
#ifndef KUNGFU_TESTS_CPP_THREADS_H_
#define KUNGFU_TESTS_CPP_THREADS_H_

#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace kungfu::testing {

// Calls body(number) for 0 ... n - 1, side by side; what each threw.
template <typename Body>
std::vector<std::exception_ptr> CollectOf(uint32_t n, const Body& body) {
  std::vector<std::exception_ptr> errors(n);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < n; i++) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Returns whether `is_so` has become true in time.
template <typename IsSo>
bool Soon(const IsSo& is_so) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::seconds(30);
  for (; Clock::now() < end; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    if (is_so()) return true;
  }
  return false;
}

// Rethrows what the lowest threw.
inline void RethrowFirst(const std::vector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace kungfu::testing

#endif  // KUNGFU_TESTS_CPP_THREADS_H_
