// Collectives in C++, between the workers that kungfu-run has started: kungfu-run -np 3 build/all_reduce
#include <Python.h>
#include <kungfu/c_api.h>

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Every call returns a status. An error message begins with the name of the Python exception.
void Check(kf_status status) {
  if (status != KF_OK) throw std::runtime_error(kf_last_error());
}

// Python joins the cluster (ms_kungfu.init); C++ handles the data. So a pure C++ program contains a Python
// interpreter while this object lives. A library that a Python program loads doesn't need one.
class Membership {
 public:
  Membership() {
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0;
    PyStatus status = PyConfig_SetBytesString(&config, &config.program_name, PYTHON_PROGRAM);
    if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (PyStatus_Exception(status)) Py_ExitStatusException(status);
    if (PyRun_SimpleString("import ms_kungfu\nms_kungfu.init()\n") != 0) throw std::runtime_error("not joined");
    others_ = PyEval_SaveThread();  // Python's other threads run while this thread waits in a collective
  }
  ~Membership() {
    PyEval_RestoreThread(others_);
    PyRun_SimpleString("ms_kungfu.finalize()\n");
    Py_FinalizeEx();
  }
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

 private:
  PyThreadState* others_;
};

void Run() {
  uint32_t rank = 0, size = 0;
  Check(kf_cluster(&rank, &size, nullptr));

  // Two tensors in one operation: they are sent together, without copying them into a common buffer.
  std::vector<float> a(1000, static_cast<float>(rank + 1)), b{static_cast<float>(rank), 1};
  const kf_tensor tensors[] = {{a.data(), a.data(), a.size()}, {b.data(), b.data(), b.size()}};
  Check(kf_all_reduce("sums", tensors, 2, KF_FLOAT32, KF_SUM, "(1000,) (2,)"));

  // The same in double precision, as a mean, into a separate buffer.
  const double own = rank;
  double mean = -1;
  const kf_tensor one{&own, &mean, 1};
  Check(kf_all_reduce("mean", &one, 1, KF_FLOAT64, KF_MEAN, nullptr));

  std::printf("rank %u of %u: sum %g, ranks %g, mean %g\n", rank, size, static_cast<double>(a.back()),
              static_cast<double>(b[1]), mean);
  std::fflush(stdout);
}

}  // namespace

int main() {
  try {
    const Membership membership;
    Run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "all_reduce: %s\n", error.what());
    return 1;
  }
}
