// The Python module ms_kungfu._core: Python's access to the runtime. This layer converts arguments,
// and releases the GIL during calls that wait.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <tuple>

#include "base/forks.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/termination.h"
#include "base/trace.h"
#include "bindings/waiting.h"
#include "c_api/failure.h"
#include "collectives/dtype.h"
#include "collectives/host/deadlock.h"
#include "collectives/reduce.h"
#include "collectives/traffic.h"
#include "kungfu/device.h"
#include "monitoring/gradient_norms.h"
#include "runtime/peer.h"
#include "runtime/stillness.h"
#include "shards/step.h"
#include "transport/shm/segment_control_block.h"

namespace py = pybind11;

namespace kungfu {

void RegisterBench(py::module_& m);      // bench.cc
void RegisterTransport(py::module_& m);  // transport.cc
void RegisterShards(py::module_& m);     // shards.cc
void RegisterStore(py::module_& m);      // store.cc

namespace {

// A contiguous Python buffer, which this object keeps alive.
class Buffer {
 public:
  Buffer(const py::object& object, bool writable) {
    const int flags = PyBUF_ND | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return view_.buf; }
  size_t bytes() const { return static_cast<size_t>(view_.len); }
  const char* format() const { return view_.format == nullptr ? "B" : view_.format; }
  std::string Shape() const {
    std::string text = "(";
    for (int i = 0; i < view_.ndim; i++) text += (i == 0 ? "" : ",") + std::to_string(view_.shape[i]);
    return text + (view_.ndim == 1 ? ",)" : ")");
  }

 private:
  Py_buffer view_{};
};

// Returns `dtype` as a kf_dtype. If `dtype` is negative, returns the buffer's own dtype.
kf_dtype DtypeOf(const Buffer& buffer, int dtype) {
  if (dtype >= 0) {
    if (!IsDtype(dtype)) throw Error(KF_TYPE, Text("no dtype has number ", dtype));
    return static_cast<kf_dtype>(dtype);
  }
  static constexpr std::pair<char, kf_dtype> kFormats[] = {
      {'b', KF_INT8},    {'B', KF_UINT8},   {'h', KF_INT16},   {'H', KF_UINT16}, {'i', KF_INT32},
      {'I', KF_UINT32},  {'l', KF_INT64},   {'q', KF_INT64},   {'L', KF_UINT64}, {'Q', KF_UINT64},
      {'e', KF_FLOAT16}, {'f', KF_FLOAT32}, {'d', KF_FLOAT64},
  };
  const char* format = buffer.format();
  if (std::strchr("@=<", format[0]) != nullptr && format[0] != '\0') format++;
  for (const auto& [letter, known] : kFormats) {
    if (format[0] == letter && format[1] == '\0') return known;
  }
  throw Error(KF_TYPE, Text("collectives don't accept elements of format '", buffer.format(),
                            "'; the supported dtypes are (u)int8 to (u)int64, float16, bfloat16, float32 and float64"));
}

// Returns the communicator. If this process hasn't joined the cluster yet, it joins first. The wait
// ends if a Python signal handler raises an exception.
std::shared_ptr<Communicator> Joined() {
  const InterruptCheck check(CheckOfThread());
  return Peer::Get().Current();
}

// Returns the tensor for an all-reduce that is split into start and wait. The output must have the
// same size as the input.
kf_tensor Tensor(const Buffer& input, const Buffer& output, kf_dtype dtype) {
  if (output.bytes() != input.bytes()) {
    throw Error(KF_INVALID, Text("out has ", output.bytes(), " bytes, but needs ", input.bytes()));
  }
  return {input.data(), output.data(), input.bytes() / SizeOf(dtype)};
}

// One operation on one array, which can run any number of times. The object holds the input and
// output buffers. It doesn't copy the operation's name, so the caller must keep the name alive.
class ArrayOperation {
 public:
  ArrayOperation(const Operation& operation, const py::object& in, const py::object& out, int dtype,
                 const std::string& kind = "")
      : operation_(operation),
        input_(in, /*writable=*/false),
        output_(out, /*writable=*/true),
        layout_(kind + input_.Shape()) {
    operation_.dtype = DtypeOf(input_, dtype);
    if (input_.bytes() % SizeOf(operation_.dtype) != 0) {
      throw Error(KF_INVALID,
                  Text(Title(), input_.bytes(), " bytes aren't a whole number of ", NameOf(operation_.dtype)));
    }
    const auto* const from = static_cast<const char*>(input_.data());
    const auto* const to = static_cast<const char*>(output_.data());
    if (from < to + output_.bytes() && to < from + input_.bytes() &&
        (from != to || input_.bytes() != output_.bytes())) {
      throw Error(KF_INVALID,
                  Text(Title(), "`out` partly overlaps the input; pass the input itself or separate memory"));
    }
    tensor_ = {input_.data(), output_.data(), input_.bytes() / SizeOf(operation_.dtype)};
    operation_.layout = layout_.c_str();
    operation_.tensors = &tensor_;
    operation_.num_tensors = 1;
  }
  ArrayOperation(const ArrayOperation&) = delete;
  ArrayOperation& operator=(const ArrayOperation&) = delete;

  void Run() const {
    // Check the size against the communicator that also runs the operation. Another thread may
    // replace the current communicator at any time.
    const auto communicator = Joined();
    const size_t grow = operation_.kind == Kind::kAllGather ? communicator->size() : 1;
    const size_t shrink = operation_.kind == Kind::kReduceScatter ? communicator->size() : 1;
    if (output_.bytes() * shrink != input_.bytes() * grow) {
      throw Error(KF_INVALID, Text(Title(), "out has ", output_.bytes(), " bytes, but needs ",
                                   input_.bytes() * grow / shrink, " with ", communicator->size(), " ranks"));
    }
    shards::Step::Get().Refuse(operation_.name, /*gradients=*/false);
    Waiting([&] { communicator->Run(operation_); });
  }

 private:
  std::string Title() const { return Text(NameOf(operation_.kind), " \"", operation_.name, "\": "); }

  Operation operation_;
  const Buffer input_, output_;
  const std::string layout_;
  kf_tensor tensor_{};
};

Operation AllReduce(const char* name, int op) {
  return {Kind::kAllReduce, name, nullptr, 0, KF_UINT8, static_cast<kf_op>(op)};
}

// Returns the maximum over all ranks of three values: the newest announced cluster version, a requested size, and the
// outcome of a request. Called after a step. Collective. Also returns whether all ranks passed the same `word`. The
// words are equal if and only if the maximum of the words is the complement of the maximum of their complements. One
// call does all this, because Python code is slow here: the step's computation has emptied the caches.
std::tuple<uint64_t, uint64_t, uint64_t, bool> AgreeAfterStep(uint64_t size, uint64_t outcome, uint64_t word) {
  const auto communicator = Joined();
  uint64_t row[] = {communicator->announced(), size, outcome, word, ~word};
  kf_tensor tensor{row, row, std::size(row)};
  Operation operation = AllReduce("kungfu/step", KF_MAX);
  operation.dtype = KF_UINT64;
  operation.layout = "(5,)";
  operation.tensors = &tensor;
  operation.num_tensors = 1;
  shards::Step::Get().Refuse(operation.name, /*gradients=*/false);
  Waiting([&] { communicator->Run(operation); });
  return {row[0], row[1], row[2], row[3] == ~row[4]};
}

// An all-reduce that a program prepares once and runs many times.
class PreparedAllReduce {
 public:
  PreparedAllReduce(std::string name, const py::object& in, const py::object& out, int op, int dtype)
      : name_(std::move(name)), operation_(AllReduce(name_.c_str(), op), in, out, dtype) {}
  void Run() const { operation_.Run(); }

 private:
  const std::string name_;
  const ArrayOperation operation_;
};

// Throws the error that a failed call to the C ABI has recorded.
void Check(kf_status status) {
  if (status == KF_OK) return;
  const std::string text = kf_last_error();
  throw Error(status, text.substr(text.find(": ") + 2));
}

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// Converts a Python handler's exception to the form that crosses the C ABI ("ResizeError: ..."),
// and throws the result. If the caller is Python too, KeyboardInterrupt and SystemExit stay
// unchanged.
[[noreturn]] void Rethrow(py::error_already_set& raised) {
  if (!raised.matches(PyExc_Exception) && InterruptCheck::IsSet()) {
    const std::string by = py::str(raised.type().attr("__name__"));
    raised.restore();
    throw Interrupted(by);
  }
  const std::string type = py::str(raised.type().attr("__name__"));
  const std::string text = py::str(raised.value());
  for (int status = KF_INVALID; status <= KF_DEVICE; status++) {
    if (type == StatusName(static_cast<kf_status>(status))) throw Error(static_cast<kf_status>(status), text);
  }
  throw Error(KF_RESIZE, Text(type, ": ", text));
}

// Holds a reference to `callable`. When the last copy of the handler is destroyed, on any thread,
// the deleter takes the GIL and releases the reference.
std::shared_ptr<py::object> Hold(const py::object& callable) {
  return {new py::object(callable), [](py::object* object) {
            if (Py_IsInitialized() == 0) return;
            py::gil_scoped_acquire acquire;
            delete object;
          }};
}

Peer::JoinHandler JoinHandlerFrom(const py::object& callable) {
  if (callable.is_none()) return nullptr;
  return [held = Hold(callable)] {
    py::gil_scoped_acquire acquire;
    try {
      (*held)();
    } catch (py::error_already_set& raised) {
      Rethrow(raised);
    }
  };
}

Peer::ResizeHandler HandlerFrom(const py::object& callable) {
  if (callable.is_none()) return nullptr;
  return [held = Hold(callable)](uint32_t size) {
    py::gil_scoped_acquire acquire;
    try {
      const auto outcome = (*held)(size).cast<std::pair<bool, bool>>();
      return ResizeOutcome{outcome.first, outcome.second};
    } catch (py::error_already_set& raised) {
      Rethrow(raised);
    }
  };
}

PYBIND11_MODULE(_core, m) {
  m.doc() = "Runtime of ms_kungfu: collectives between the processes of a cluster. Use ms_kungfu.comm instead.";

  // ms_kungfu.errors creates the typed exception, because it defines the exception classes.
  // RecordFailure stores the error for ms_kungfu.last_error().
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Interrupted& error) {
      RecordFailure(error);
      if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_KeyboardInterrupt, error.what());
    } catch (const Error& error) {
      RecordFailure(error);
      const py::object typed = py::module_::import("ms_kungfu.errors").attr("from_message")(error.Described());
      PyErr_SetObject(py::type::of(typed).ptr(), typed.ptr());
    }
  });

  m.def("rank", [] { return Joined()->rank(); });
  m.def("size", [] { return Joined()->size(); });
  m.def("cluster_version", [] { return Joined()->cluster_version(); });
  m.def(
      "announced_version", [] { return Peer::Get().Current()->announced(); },
      "Return the newest cluster version that the launcher has announced.");
  m.def(
      "deadlines_held", [] { return Peer::Get().Current()->deadlines_held(); },
      "Return whether the launcher waits for the job's store. No member's deadline runs during this wait.");
  m.def(
      "sync_points", [] { return Peer::Get().Current()->sync_points(); },
      "Return the number of sync points that members have requested in this cluster version.");
  m.def(
      "request_sync_point", [](uint64_t number) { Peer::Get().Current()->RequestSyncPoint(number); }, py::arg("number"),
      "Ask all members to reach the sync point with this number (1 or more). Not collective.");
  m.def(
      "set_busy", [](bool busy) { Peer::Get().Current()->SetBusy(busy); }, py::arg("busy"),
      "Set whether this rank does long work that involves no other rank. Meanwhile the other ranks' deadlines pause.");
  m.def(
      "note_activity", [](uint32_t activity) { Peer::Get().Current()->NoteActivity(activity); }, py::arg("activity"),
      "Report what the program does, as an index of ACTIVITIES, for `kungfu-run -dashboard`. Not collective.");
  m.def(
      "note_step",
      [](uint64_t step, double each_s) {
        const std::chrono::duration<double> each(each_s);
        Peer::Get().Current()->NoteStep(step, std::chrono::duration_cast<std::chrono::nanoseconds>(each));
      },
      py::arg("step"), py::arg("each_s"),
      "Report that training has finished this step. `each_s`: seconds per step, or 0 if not known yet. Not "
      "collective.");
  m.def(
      "living", [] { return Peer::Get().Current()->Living(); },
      "Return the ranks that this process doesn't know to have failed.");
  m.def(
      "take_reductions",
      [] {
        const auto taken = Peer::Get().Current()->TakeReductions();
        return std::make_tuple(taken.gradient, taken.any, taken.commits, taken.first, taken.last);
      },
      "Return which reductions have ended since the last call: (latest gradient reduction, latest other all-reduce, "
      "number of commits, first commit, last commit). All values except the number of commits are generations plus "
      "one, and 0 means none. A commit is a set of gradient reductions that ended together.");
  m.def(
      "members_of", [](uint32_t generation) { return Peer::Get().Current()->MembersOf(generation); },
      "Return the ranks that contributed to operations that ended in this generation.");
  m.def(
      "set_weight",
      [](uint32_t weight) {
        if (weight >> kWeightBits != 0) {
          throw Error(KF_INVALID, Text("the weight ", weight, " is too large; it must be below 2^", kWeightBits));
        }
        Peer::Get().SetWeight(weight);
      },
      py::arg("weight"), "Set this rank's weight (its number of samples) in the next gradient reductions.");
  m.def(
      "set_claim", [](const std::string& claim) { Peer::Get().SetClaim(claim); }, py::arg("claim"),
      "Set the description of the parameters that this rank begins to train. Gradient reductions compare it between "
      "ranks.");
  m.def(
      "set_sources", [](const Members& sources) { Peer::Get().Current()->SetSources(sources); }, py::arg("sources"),
      "Set the ranks that have the same data (ascending, the same list on all ranks). Valid until the next call. A "
      "broadcast whose root is one of these ranks may copy the data from any of them.");
  m.def(
      "state_root", [] { return Peer::Get().Current()->StateRoot(); },
      "Return the lowest rank that had the training state when it joined, or the cluster size if no rank had it.");
  m.def(
      "last_error", [] { return LastFailureOfProcess(); }, "Return the message of this process's last failure, or ''.");
  m.def("instruction_set", [] { return std::string(ReductionInstructionSet()); });

  m.def(
      "join",
      [](int fd, uint32_t rank, const std::string& address, bool has_state, double collective_timeout_s,
         double join_timeout_s) {
        Waiting([&] {
          Peer::Get().Join(fd, rank, address, has_state,
                           {Milliseconds(collective_timeout_s), Milliseconds(join_timeout_s)});
        });
      },
      py::arg("fd"), py::arg("rank"), py::arg("address"), py::arg("has_state"), py::arg("collective_timeout_s"),
      py::arg("join_timeout_s"));
  m.def(
      "join_hosts",
      [](int local_fd, int control_fd, int request_fd, int model_fd, uint32_t rank,
         const std::vector<uint32_t>& host_of_rank, const std::string& address, bool has_state,
         double collective_timeout_s, double join_timeout_s) {
        Waiting([&] {
          Peer::Get().JoinHosts(local_fd, control_fd, request_fd, model_fd, hosts::Places(host_of_rank), rank, address,
                                has_state, {Milliseconds(collective_timeout_s), Milliseconds(join_timeout_s)});
        });
      },
      py::arg("local_fd"), py::arg("control_fd"), py::arg("request_fd"), py::arg("model_fd"), py::arg("rank"),
      py::arg("host_of_rank"), py::arg("address"), py::arg("has_state"), py::arg("collective_timeout_s"),
      py::arg("join_timeout_s"), "Join a cluster over several hosts. The caller still owns the descriptors.");
  m.def("leave", [](const std::string& reason) { Peer::Get().Leave(reason); }, py::arg("reason"));
  m.def("reset", [] { Peer::Get().Reset(); });
  m.def("catch_sigterm", &CatchSigterm, py::arg("fd"), py::arg("supervisor"),
        "From now on the first SIGTERM writes a byte to the pipe `fd`. The second SIGTERM, and any SIGTERM from the "
        "process `supervisor`, has its default action.");
  m.def("end_by_sigterm", &EndBySigterm, "End this process by the default action of SIGTERM.");
  m.def(
      "resize",
      [](uint32_t size) {
        ResizeOutcome outcome;
        Waiting([&] { outcome = Peer::Get().Resize(size); });
        return std::make_pair(outcome.changed, outcome.detached);
      },
      py::arg("size"));
  m.def(
      "set_resize_handler", [](const py::object& callable) { Peer::Get().SetResizeHandler(HandlerFrom(callable)); },
      py::arg("callable"));

  m.def(
      "set_join_handler", [](const py::object& callable) { Peer::Get().SetJoinHandler(JoinHandlerFrom(callable)); },
      py::arg("callable"),
      "Set the function that a process calls before it first uses the cluster, unless the process has already joined.");

  m.def(
      "all_reduce",
      [](const char* name, const py::object& in, const py::object& out, int op, int dtype) {
        ArrayOperation(AllReduce(name, op), in, out, dtype).Run();
      },
      py::arg("name"), py::arg("input"), py::arg("output"), py::arg("op"), py::arg("dtype") = -1);
  m.def("agree_after_step", &AgreeAfterStep, py::arg("size"), py::arg("outcome"), py::arg("word"),
        "Return the maximum of all ranks' announced versions, `size`s and `outcome`s, and whether all `word`s are "
        "equal.");
  py::class_<PreparedAllReduce>(m, "PreparedAllReduce")
      .def(py::init<std::string, const py::object&, const py::object&, int, int>(), py::arg("name"), py::arg("input"),
           py::arg("output"), py::arg("op"), py::arg("dtype") = -1)
      .def("run", &PreparedAllReduce::Run);
  m.def(
      "start_all_reduce",
      [](const char* name, const py::object& in, const py::object& out, int op, int dtype) {
        const Buffer input(in, /*writable=*/false);
        const Buffer output(out, /*writable=*/true);
        const kf_dtype type = DtypeOf(input, dtype);
        const kf_tensor tensor = Tensor(input, output, type);
        const std::string layout = input.Shape();
        Joined();
        return Peer::Get().Start({Kind::kAllReduce, name, &tensor, 1, type, static_cast<kf_op>(op), 0, layout.c_str()});
      },
      py::arg("name"), py::arg("input"), py::arg("output"), py::arg("op"), py::arg("dtype") = -1,
      "Start an all-reduce. Return its ticket, or 0 if the output already has the result.");
  m.def(
      "wait",
      [](uint64_t ticket, const py::object& out, int dtype) {
        const Buffer output(out, /*writable=*/true);
        const kf_tensor tensor = Tensor(output, output, DtypeOf(output, dtype));
        const kf_started started{ticket, &tensor, 1};
        py::gil_scoped_release release;
        Peer::Get().Wait(&started, 1);
      },
      py::arg("ticket"), py::arg("output"), py::arg("dtype") = -1,
      "Wait for a started all-reduce. Pass the output that was passed to start it.");
  m.def(
      "broadcast",
      [](const char* name, const py::object& in, const py::object& out, uint32_t root, int dtype,
         const std::string& kind) {
        ArrayOperation({Kind::kBroadcast, name, nullptr, 0, KF_UINT8, KF_SUM, root}, in, out, dtype, kind).Run();
      },
      py::arg("name"), py::arg("input"), py::arg("output"), py::arg("root"), py::arg("dtype") = -1,
      py::arg("kind") = "");
  m.def(
      "all_gather",
      [](const char* name, const py::object& in, const py::object& out, int dtype, const std::string& kind) {
        ArrayOperation({Kind::kAllGather, name}, in, out, dtype, kind).Run();
      },
      py::arg("name"), py::arg("input"), py::arg("output"), py::arg("dtype") = -1, py::arg("kind") = "",
      "Gather all ranks' arrays. `kind`: the elements' actual type if they are sent as another type. The consistency "
      "check compares it.");
  m.def(
      "reduce_scatter",
      [](const char* name, const py::object& in, const py::object& out, int op, int dtype) {
        ArrayOperation({Kind::kReduceScatter, name, nullptr, 0, KF_UINT8, static_cast<kf_op>(op)}, in, out, dtype)
            .Run();
      },
      py::arg("name"), py::arg("input"), py::arg("output"), py::arg("op"), py::arg("dtype") = -1);
  m.def(
      "barrier",
      [](const char* name) {
        const auto communicator = Joined();
        Waiting([&] { communicator->Run({Kind::kBarrier, name}); });
      },
      py::arg("name"));

  m.def(
      "await_slow_wait",
      [] {
        py::gil_scoped_release release;
        host::SlowThreads::Get().AwaitOne();
      },
      "Wait until some thread of this process has waited in a collective for 0.1 s. "
      "Signals don't end this call.");
  m.def(
      "look_for_deadlock",
      [](bool alone, bool main_waits, const std::string& place) {
        static Stillness* const stillness = new Stillness;  // the calling thread may outlive static destructors
        py::gil_scoped_release release;
        const bool still = stillness->Look(host::SlowThreads::Get().All(), main_waits) && alone;
        Peer::Get().Current()->LookForDeadlock(still, place);
      },
      py::arg("alone"), py::arg("main_waits"), py::arg("place"),
      "Close the communicator if all ranks wait for each other. Call it several times a second, on one thread, while "
      "there are slow waits. `alone`: only Python's main thread starts collectives. `main_waits`: the main thread is "
      "either in a collective or in a call to MindSpore.");

  m.def(
      "device_open",
      [](int kind, const char* runtime_libraries, const char* engine_libraries, int engine, uint64_t chunk_bytes,
         double timeout_s) {
        py::gil_scoped_release release;
        const kf_device_options options{runtime_libraries, engine_libraries, static_cast<kf_engine>(engine),
                                        chunk_bytes, static_cast<uint32_t>(timeout_s * 1000)};
        Check(kf_device_open(static_cast<kf_device_kind>(kind), &options));
      },
      py::arg("kind"), py::arg("runtime_libraries"), py::arg("engine_libraries"), py::arg("engine"),
      py::arg("chunk_bytes"), py::arg("timeout_s"));
  m.def("device_close", &kf_device_close, py::call_guard<py::gil_scoped_release>());
  m.def("device_engine", [] { return std::string(kf_device_engine()); });

  m.def(
      "set_log",
      [](const py::object& callable) {
        LogHandler handler;
        if (!callable.is_none()) {
          handler = [held = Hold(callable)](const std::string& line) {
            py::gil_scoped_acquire acquire;
            try {
              (*held)(line);
            } catch (py::error_already_set& raised) {
              raised.discard_as_unraisable("ms_kungfu's log handler");
            }
          };
        }
        py::gil_scoped_release release;  // the previous handler may need the GIL before it can return
        SetLog(std::move(handler));
      },
      py::arg("callable"),
      "Set the handler of the runtime's log lines (long waits). It runs on a separate thread. None: lines go to "
      "stderr. The handler is removed at exit.");
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    py::gil_scoped_release release;
    SetLog(nullptr);
  }));

  // ---- the trace ----
  m.def("trace_start", &Trace::Start, py::arg("fd"), py::arg("path"), py::arg("max_bytes"),
        "Write this process's trace to the file `fd`, which the runtime then owns. `path` is used in messages.");
  m.def("trace_stop", &Trace::Stop, py::call_guard<py::gil_scoped_release>(), "Write the last events of the trace.");
  m.def(
      "trace_now", [] { return Trace::On() ? Trace::Now() : 0; },
      "Return CLOCK_MONOTONIC in nanoseconds, or 0 if no trace is written.");
  m.def("trace_span", &Trace::AddProgram, py::arg("name"), py::arg("began_ns"),
        "Add an event `name` to the trace. It begins at `began_ns` and ends now.");
  m.def("trace_step_begins", &Trace::StepBegins, "Record that a training step begins.");
  m.def("trace_step_ends", &Trace::StepEnds, py::arg("step"), "Add the step to the trace.");

  m.def("set_delay_for_tests", &SetDelayForTests, py::arg("milliseconds"));

  // ---- monitoring ----
  m.def(
      "traffic",
      [] {
        const TrafficTotals all = Traffic::Get().Read();
        const auto communicator = Peer::Get().Current();
        std::vector<uint64_t> received(communicator->size());
        for (uint32_t r = 0; r < received.size(); r++) {
          received[r] = r == communicator->rank() ? 0 : all.received_from_each + all.received_from_root[r];
        }
        return std::make_tuple(all.operations, all.brought_bytes, all.busy_s, all.exposed_s, received);
      },
      "Return (operations, bytes of input, seconds in collectives, exposed part of these seconds, bytes received from "
      "each rank) since the process started.");
  m.def(
      "watch_gradients", [](const std::string& name) { monitoring::GradientNorms::Get().Watch(name); }, py::arg("name"),
      "Sum up the squared norms of later all-reduces with this name. '' stops this.");
  m.def(
      "take_gradient_norms",
      [] {
        const monitoring::Norms norms = monitoring::GradientNorms::Get().Take();
        return std::make_tuple(norms.brought, norms.reduced, norms.elements, norms.cpu_s);
      },
      "Return (squared norm of this rank's gradients, squared norm of their mean, elements, CPU seconds) since the "
      "last call.");

  // ---- for the launcher ----
  m.def(
      "create_segment", &shm::Segment::Create, py::arg("size"), py::arg("cluster_version"), py::arg("cores"),
      py::arg("recovers") = false, py::arg("control_block") = false,
      "Create the shared memory of one cluster version. Return its descriptor, which the caller owns. `control_block`: "
      "set it if the cluster has several hosts. Ranks and launchers then use this memory only to notify each other.");
  py::class_<shm::SegmentControlBlock>(m, "SegmentControl", "The launcher's access to a segment.")
      .def(py::init(
               [](int fd) { return std::make_unique<shm::SegmentControlBlock>(std::make_shared<shm::Segment>(fd)); }),
           py::arg("fd"))
      .def_property_readonly("size", &shm::SegmentControlBlock::size)
      .def_property_readonly("cluster_version", &shm::SegmentControlBlock::cluster_version)
      .def("mark_lost", &shm::SegmentControlBlock::MarkLost, py::arg("rank"), py::arg("reason"),
           py::arg("recover") = false, py::arg("reaped") = false,
           "Notify the members that `rank` has failed. They continue without it, or their waits end with "
           "PeerLostError. The rank's process may still run. `reaped`: whether the process has ended, so that its "
           "resources are free. A later call can set `reaped`.")
      .def("gave_up", &shm::SegmentControlBlock::GaveUpAlone, py::arg("rank"),
           "Return why the running process of `rank` can't continue and must be ended, or '' if it can continue.")
      .def(
          "awaited",
          [](const shm::SegmentControlBlock& control_block) {
            std::vector<std::tuple<uint32_t, uint32_t, bool>> waits;
            for (uint32_t r = 0; r < control_block.size(); r++) {
              if (const auto found = control_block.AwaitedBy(r)) waits.emplace_back(r, found->peer, found->overdue);
            }
            return waits;
          },
          "Return (rank, rank that it waits for, whether the wait will soon time out) for each rank that waits now. If "
          "both ranks are equal, the rank waits for no particular rank.")
      .def("set_ending", &shm::SegmentControlBlock::SetEnding, py::arg("rank"), py::arg("ending"),
           "Set whether the launcher is about to end `rank`. The other ranks' waits don't time out meanwhile.")
      .def("heartbeat", &shm::SegmentControlBlock::Heartbeat, py::arg("rank"),
           "Return a number that grows while the rank's process runs, or 0 before it joins and after it leaves.")
      .def(
          "progress",
          [](const shm::SegmentControlBlock& control_block,
             uint32_t rank) -> std::optional<std::tuple<uint64_t, double, double>> {
            const auto found = control_block.ProgressOf(rank);
            if (!found.has_value()) return std::nullopt;
            using Seconds = std::chrono::duration<double>;
            return std::make_tuple(found->step, Seconds(found->each).count(), Seconds(found->ago).count());
          },
          py::arg("rank"),
          "Return (last reported step, seconds per step or 0, seconds since the report), or None if there is no "
          "report.")
      .def(
          "activity",
          [](const shm::SegmentControlBlock& control_block, uint32_t rank) {
            const auto found = control_block.ActivityOf(rank);
            const double seconds = std::chrono::duration<double>(found.ago).count();
            return std::make_tuple(
                found.activity, seconds,
                py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
                    found.operations.data(), static_cast<Py_ssize_t>(found.operations.size()), "replace")));
          },
          py::arg("rank"),
          "Return what the rank has reported: (index of its activity, seconds since the activity began, names of the "
          "operations in which its process is stuck, or '').")
      .def("announce", &shm::SegmentControlBlock::Announce, py::arg("version"),
           "Notify the members that a newer cluster version is desired.")
      .def("hold_deadlines", &shm::SegmentControlBlock::HoldDeadlines, py::arg("held"),
           "Set whether the members' deadlines are on hold because the launcher waits for the job's store.")
      .def_property_readonly("sync_points", &shm::SegmentControlBlock::sync_points)
      .def("request_sync_point", &shm::SegmentControlBlock::RequestSyncPoint, py::arg("number"),
           "Forward a sync-point request from members on another host. An old number changes nothing.");

  RegisterBench(m);
  RegisterTransport(m);
  RegisterShards(m);
  RegisterStore(m);
}

}  // namespace
}  // namespace kungfu
