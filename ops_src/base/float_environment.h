// Rounding and denormals as IEEE 754 has them by default, whatever the thread has been set to.
#ifndef KUNGFU_BASE_FLOAT_ENVIRONMENT_H_
#define KUNGFU_BASE_FLOAT_ENVIRONMENT_H_

#include <cfenv>

namespace kungfu {

// For as long as it lives. A thread of a framework may flush denormals to zero, and another one not.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&before_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace kungfu

#endif  // KUNGFU_BASE_FLOAT_ENVIRONMENT_H_
