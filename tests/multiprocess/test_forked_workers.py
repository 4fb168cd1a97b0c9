"""Workers that the fork server forks. A stand-in for MindSpore makes the tests short: it lies beside the program."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from ms_kungfu._processes import children, stat_of

pytestmark = pytest.mark.timeout(120)

GENERATOR = """
import numpy as np
class _Seed:
    def __init__(self, value): self.value = value
    def set_data(self, other): self.value = other.value
class _Generator:
    def __init__(self): self._seed = _Seed(int(np.random.randint(1 << 30)))
def _random_seeded_generator(): return _Generator()
default_generator = _random_seeded_generator()
"""
CONTEXT = """
import os
values = {"device_id": int(os.environ["DEVICE_ID"])}
class ms_ctx_param:
    device_id = "device_id"
class MSContext:
    @staticmethod
    def get_instance(): return MSContext
    set_param = values.__setitem__
"""
# In the worker that forks the fork server:
IMPORTS_FIRST = "__import__('sys').modules['__main__'].__file__.endswith('fork_program.py')"
IS_FORKED = "import gc\nforked = gc.get_freeze_count() > 0\n"


@pytest.fixture
def program(script, tmp_path):
    """Writes a program whose `import mindspore` prints `imported` and then runs `more`."""

    def write(text, more="", name="worker.py"):
        package = tmp_path / "mindspore"
        (package / "common").mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"import os\nprint('imported', flush=True)\n{more}\n")
        (package / "common" / "__init__.py").touch()
        (package / "common" / "generator.py").write_text(GENERATOR)
        (package / "_c_expression.py").write_text(CONTEXT)
        return script("import mindspore\n" + IS_FORKED + text, name)

    return write


STATE = """
import json, os, random, signal, sys, threading
import mindspore
state = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path[0], "executable": sys.executable,
    "names": {
        name: str(value).split(" at 0x")[0]
        for name, value in globals().items() if name.startswith("__") and name != "__builtins__"
    },
    "main": sys.modules["__main__"].__dict__ is globals(),
    "signals": [str(signal.getsignal(number)) for number in range(1, 32) if number not in (9, 19)],
    "command": open("/proc/self/cmdline").read().rstrip("\\0"), "comm": open("/proc/self/comm").read(),
    "parent": open(f"/proc/{os.getppid()}/comm").read(), "group": os.getpgid(0) == os.getpid(),
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int), "cwd": os.getcwd(),
    "stdin": os.readlink("/proc/self/fd/0"), "cores": sorted(os.sched_getaffinity(0)),
    "stdout": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.encoding, sys.stdout.name],
    "environment": {k: v for k, v in os.environ.items() if not k.startswith("KUNGFU_") and k != "PROBE"},
    "thread": threading.current_thread().name, "native": threading.main_thread().native_id == os.getpid(),
    "hook": sys.excepthook is sys.__excepthook__,
}
with open(os.environ["PROBE"], "w") as file:
    json.dump(state, file)
def fail():
    raise ValueError("the end")
fail()
"""


@pytest.mark.parametrize("words", [["a", "-b"], ["-u", "a"], ["-m"]])
def test_forked_program_runs_in_the_same_state_as_a_started_one(words, program, kungfu_run, tmp_path):
    python, path = program("")
    Path(path).write_text(STATE)
    flags = [word for word in words if word in ("-u", "-m")]
    name = "worker" if "-m" in words else path
    states, outputs = [], []
    for preload in ("0", "1"):
        probe = tmp_path / f"state{preload}"
        job = kungfu_run(
            "-q", "-prefix", "none", "-np", 1, python, *flags, name, *[word for word in words if word not in flags],
            environment={"KUNGFU_PRELOAD": preload, "PROBE": str(probe)},
        )  # fmt: skip
        job.assert_exit(1)
        states.append(json.loads(probe.read_text()))
        told = [re.sub(r"pid \d+", "pid", line) for line in job.stderr if "<frozen runpy>" not in line]
        outputs.append((job.stdout, told))
    assert states[0] == states[1]
    assert outputs[0] == outputs[1]
    assert states[1]["orig_argv"][0] == python  # the program has run, and not only a part of it


def test_workers_share_one_import_and_nothing_of_their_own(program, kungfu_run):
    command = program(
        "import multiprocessing, random\nimport numpy as np\nfrom mindspore import _c_expression\n"
        "from mindspore.common import generator\n"
        "print('worker', forked, random.random(), np.random.rand(), generator.default_generator._seed.value,\n"
        "    _c_expression.values['device_id'], bytes(multiprocessing.current_process().authkey))\n"
    )
    job = kungfu_run("-prefix", "none", "-np", 3, *command)
    job.assert_exit(0)
    assert job.stdout.count("imported") == 1
    drawn = [line.split()[1:] for line in job.stdout if line.startswith("worker")]
    assert [forked for forked, *_ in drawn] == ["True"] * 3
    assert {values[4] for values in drawn} == {"0", "1", "2"}
    for column in range(1, 6):
        assert len({values[column] for values in drawn}) == 3


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(7)", 7),
        ("os._exit(8)", 8),
        ("os.kill(os.getpid(), 9)", 128 + 9),
        ("raise KeyboardInterrupt", 128 + 2),
        ("import atexit; atexit.register(os.write, 1, b'atexit ran\\n'); sys.exit('a reason')", 1),
    ],
)
def test_end_of_a_forked_worker_is_the_end_of_the_job(end, code, program, kungfu_run):
    job = kungfu_run("-q", "-np", 2, *program(f"import os, sys\nassert forked\nprint('begun', flush=True)\n{end}\n"))
    job.assert_exit(code)
    if code == 1:
        assert any("a reason" in line for line in job.stderr)
        assert any("atexit ran" in line for line in job.stdout)


@pytest.mark.parametrize(
    "more",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        f"if {IMPORTS_FIRST}: raise ImportError('no')",
    ],
    ids=["another thread", "an error"],
)
def test_workers_start_as_usual_if_the_import_forbids_forking(more, program, kungfu_run):
    job = kungfu_run("-prefix", "none", "-np", 2, *program("print('worker', forked)\n", more))
    job.assert_exit(0)
    assert [line for line in job.stdout if line.startswith("worker")] == ["worker False"] * 2


def server_of(job):
    (pid,) = [pid for pid in job.processes() if Path(f"/proc/{pid}/comm").read_text() == "kungfu-forks\n"]
    return pid


WAITS = (
    "import os, time\nprint('pid', os.getpid(), forked, flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_fork_server_costs_no_worker(number, program, kungfu_run, start_module, tmp_path):
    command = program(WAITS)
    job = kungfu_run("-w", "-prefix", "none", "-np", 2, *command)
    first = job.wait_for(r"^pid (\d+) True", 2)
    os.kill(server_of(job), number)
    for size in (3, 4):
        start_module(
            "ms_kungfu.launcher", "resize", str(size), environment={"XDG_RUNTIME_DIR": str(job.runtime_dir)}
        ).wait()
        job.wait_for(r"^pid (\d+) True", size)
    assert job.stdout.count("imported") == 2  # the third worker has forked another fork server, which forked the fourth
    assert all(Path(f"/proc/{match[1]}").exists() for match in first)
    (tmp_path / "go").touch()
    job.assert_exit(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_job_ends_while_mindspore_is_imported(number, program, kungfu_run):
    job = kungfu_run("-np", 2, *program("", "import time\ntime.sleep(1000)"))
    job.wait_for("imported")
    since = time.monotonic()
    job.signal(number)
    job.wait()
    job.assert_gone(since)


def test_worker_with_another_environment_gets_a_fork_server_of_its_own(program, kungfu_run, start_module, tmp_path):
    """With one worker, OMP_NUM_THREADS is the number of cores; with as many workers as cores, it is 1."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("one core: all workers have the same environment")
    command = program(WAITS + "print('threads', os.environ['OMP_NUM_THREADS'], flush=True)\n")
    job = kungfu_run("-w", "-prefix", "none", "-np", 1, *command)
    job.wait_for(r"^pid (\d+) True")
    start_module(
        "ms_kungfu.launcher", "resize", str(cores), environment={"XDG_RUNTIME_DIR": str(job.runtime_dir)}
    ).wait()
    job.wait_for(r"^pid (\d+) True", cores)
    (tmp_path / "go").touch()
    job.assert_exit(0)
    assert sorted(line for line in job.stdout if line.startswith("threads")) == sorted(
        ["threads 1"] * (cores - 1) + [f"threads {cores}"]
    )


def test_worker_killed_during_its_import_leaves_no_busy_loop(program, kungfu_run):
    more = "import time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    job = kungfu_run("-w", "-prefix", "none", "-np", 1, *program(WAITS, more))
    job.wait_for("imported")
    (supervisor,) = [pid for pid in job.processes() if Path(f"/proc/{pid}/comm").read_text() == "kungfu-guard\n"]
    (worker,) = children(supervisor)
    os.kill(worker, signal.SIGSTOP)
    before = used_s(supervisor)
    time.sleep(1)
    assert used_s(supervisor) - before < 0.5
    os.kill(worker, signal.SIGKILL)
    job.assert_exit(128 + 9)


def used_s(pid):
    """Processor time in seconds."""
    return sum(map(int, stat_of(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def test_import_that_hangs_delays_other_workers_for_a_limited_time(program, start_module, tmp_path):
    more = f"import time\nwhile {IMPORTS_FIRST} and not os.path.exists('go'): time.sleep(0.01)"
    (tmp_path / "short_limits.py").write_text(
        "from ms_kungfu.launcher.agent import fork_server\nfork_server._IMPORT_S = 5.0\n"
        "from ms_kungfu.launcher.cli import main\nraise SystemExit(main())\n"
    )
    job = start_module("short_limits", "-prefix", "none", "-np", 2, *program("print('worker', forked)\n", more))
    job.wait_for("worker False")
    (tmp_path / "go").touch()
    job.assert_exit(0)
    assert job.stdout.count("worker True") == 1


def test_long_command_line_is_passed_on(program, kungfu_run):
    command = program("import sys\nprint('length', forked, len(sys.argv[1]), len(sys.argv[-1]))\n")
    for length in (100_000, 131_000):
        job = kungfu_run("-prefix", "none", "-np", 2, *command, *["x" * length] * 4)
        job.assert_exit(0)
        lengths = [line.split()[2:] for line in job.stdout if line.startswith("length")]
        assert lengths == [[str(length)] * 2] * 2
