"""kungfu-run from its first process to its last, with workers that need no MindSpore. No way to end leaves anything."""

import contextlib
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import Terminal

from ms_kungfu.launcher.affinity import allowed_cores
from ms_kungfu.launcher.controller.following import CopiesWatch

pytestmark = pytest.mark.timeout(60)

# A worker that tells where it is, then waits to be killed. It has a child in its process group and another one that has
# left it, as daemons do, and says which broker it was given.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(f"ready rank={os.environ['RANK_ID']} pid={os.getpid()} child={child.pid} daemon={daemon.pid}", flush=True)
print(f"broker={os.environ['KUNGFU_BROKER']}", flush=True)
time.sleep(1000)
"""
# The same, deaf to polite signals.
DEAF = "import signal\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\n" + FAMILY


def started(job, size):
    """The workers' matches in the order of their ranks."""
    found = job.wait_for(r"^ready rank=(\d+) pid=(\d+) child=(\d+) daemon=(\d+)", size)
    job.wait_for("broker=", size)
    return sorted(found, key=lambda match: int(match[1]))


def guard_of(job):
    (guard,) = [pid for pid in job.processes() if _name_of(pid) == "kungfu-guard"]
    return guard


def _name_of(pid):
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


# ---- what a worker is given ----


def test_workers_get_rank_size_and_a_share_of_the_cores(kungfu_run, script):
    worker = script(
        "import os\n"
        "e = os.environ\n"
        "print(e['RANK_ID'], e['RANK_SIZE'], e['DEVICE_ID'], e['KUNGFU_SELF'], e['KUNGFU_INCARNATION'],\n"
        "      e['KUNGFU_PORT_RANGE'], len(os.sched_getaffinity(0)) == int(e['OMP_NUM_THREADS']),\n"
        "      *(e.get(n) for n in ('KUNGFU_CONFIG_SERVER', 'KUNGFU_WATCH', 'KUNGFU_HOSTS')))\n"
    )
    no_devices = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    job = kungfu_run("-q", "-np", 2, *worker, environment=no_devices)
    job.assert_exit(0)
    assert sorted(job.stdout) == [
        f"{rank} 2 {rank} 127.0.0.1:1000{rank} 0 10000-11000 True None None None" for rank in (0, 1)
    ]


def test_cores_are_shared_evenly_or_not_at_all(kungfu_run, script):
    worker = script("import os; print('cores', *sorted(os.sched_getaffinity(0)), os.environ.get('OMP_NUM_THREADS'))")
    cores = sorted(os.sched_getaffinity(0))
    job = kungfu_run("-q", "-np", 2 * len(cores), *worker)
    job.assert_exit(0)
    assert sorted(job.stdout) == sorted(2 * [f"cores {core} 1" for core in cores])
    job = kungfu_run("-q", "-np", 2, "-affinity", "none", *worker)
    job.assert_exit(0)
    assert job.stdout == 2 * [f"cores {' '.join(map(str, cores))} None"]


def test_workers_of_a_job_get_one_cap_of_vector_instructions(kungfu_run, script):
    worker = script("import os; print([os.environ.get(name + '_MAX_CPU_ISA') for name in ('ONEDNN', 'DNNL')])")
    none = {"ONEDNN_MAX_CPU_ISA": "", "DNNL_MAX_CPU_ISA": ""}
    job = kungfu_run("-np", 2, "-cpu-isa", "sse41", *worker, environment=none)
    job.assert_exit(0)
    assert job.stdout == ["['SSE41', '']"] * 2
    assert len(re.findall(r'cpu isa: cap=SSE41 host=127\.0\.0\.1 reason="-cpu-isa sse41"', job.output)) == 1
    job = kungfu_run("-np", 2, "-cpu-isa", "sse41", *worker, environment={**none, "DNNL_MAX_CPU_ISA": "AVX"})
    job.assert_exit(0)
    assert job.stdout == ["['AVX', 'AVX']"] * 2
    assert "cpu isa:" not in job.output
    job = kungfu_run("-np", 2, "-cpu-isa", "native", *worker, environment=none)
    job.assert_exit(0)
    assert job.stdout == ["['', '']"] * 2
    assert "cpu isa:" not in job.output


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to differ")
def test_jobs_beside_each_other_run_on_different_cores(kungfu_run, script):
    worker = script(
        "import os, sys\nprint('cores', *sorted(os.sched_getaffinity(0)), flush=True)\n"
        "import time\ntime.sleep(float(sys.argv[1]))\n"
    )
    one, *others = sorted(os.sched_getaffinity(0), key=allowed_cores().index)
    flags = ("-np", 1, "-cores-per-worker", 1)
    first = kungfu_run(*flags, *worker, 1000)
    first.wait_for(f"^cores {one}$")
    second = kungfu_run(*flags, *worker, 0)
    second.assert_exit(0)
    assert second.stdout == [f"cores {others[0]}"]
    assert "cores shared" not in second.output
    third = kungfu_run("-np", len(others) + 1, "-cores-per-worker", 1, *worker, 0)
    third.assert_exit(0)
    assert sorted(third.stdout) == sorted(f"cores {core}" for core in (one, *others))
    assert third.output.count(f"cores shared: cpus={one} ") == 1
    first.signal(signal.SIGKILL)
    first.wait()
    fourth = kungfu_run(*flags, *worker, 0)
    fourth.assert_exit(0)
    assert fourth.stdout == [f"cores {one}"]


def test_environment_set_by_the_user_stays(kungfu_run, script):
    worker = script("import os; print(os.environ['OMP_NUM_THREADS'], os.environ['KUNGFU_JOB_SECRET'])")
    job = kungfu_run("-q", *worker, environment={"OMP_NUM_THREADS": "7", "KUNGFU_JOB_SECRET": "abcdef"})
    job.assert_exit(0)
    assert job.stdout == ["7 abcdef"]


def test_an_outer_job_does_not_shine_through(kungfu_run, script):
    worker = script("import os; print(os.environ.get('KUNGFU_WATCH'), os.environ.get('KUNGFU_CONFIG_SERVER'))")
    job = kungfu_run("-q", *worker, environment={"KUNGFU_WATCH": "1", "KUNGFU_CONFIG_SERVER": "http://x/config"})
    job.assert_exit(0)
    assert job.stdout == ["None None"]


def test_the_secret_is_on_no_command_line_and_in_no_log(kungfu_run, script, tmp_path):
    job = kungfu_run("-np", 2, "-logdir", "logs", "-logfile", "l.log", "-w", *script(FAMILY))
    started(job, 2)
    worker = started(job, 2)[0][2]
    secret = re.search(r"KUNGFU_JOB_SECRET=([0-9a-f]{64})", Path(f"/proc/{worker}/environ").read_text())[1]
    assert secret not in "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in job.processes())
    job.signal(signal.SIGTERM)
    job.wait()
    assert secret not in job.output
    assert secret not in "".join(path.read_text() for path in (tmp_path / "logs").iterdir())


# ---- how it ends ----


def test_success_ends_with_0_and_leaves_nothing(kungfu_run):
    job = kungfu_run("-np", 3, "sh", "-c", "echo broker=$KUNGFU_BROKER")
    job.assert_exit(0)
    job.assert_gone(time.monotonic())
    assert len(job.stdout) == 3
    assert "all workers have finished" in job.output


def test_processes_that_a_finished_worker_left_end_with_the_job(kungfu_run):
    job = kungfu_run("sh", "-c", "sleep 1000 & setsid sleep 1000 & echo broker=$KUNGFU_BROKER")
    job.assert_exit(0)
    job.assert_gone(time.monotonic())


@pytest.mark.parametrize("code", [1, 3, 255])
def test_first_failing_worker_gives_its_code_and_its_name(kungfu_run, script, code):
    on_request = f"import signal, sys\nsignal.signal(signal.SIGUSR2, lambda *_: sys.exit({code}))\n"
    job = kungfu_run("-np", 3, *script(on_request + FAMILY))
    pid = int(started(job, 3)[1][2])
    begin = time.monotonic()
    os.kill(pid, signal.SIGUSR2)
    job.assert_exit(code)
    job.assert_gone(begin)
    assert job.stderr[-1] == f"kungfu-run: worker 1 (127.0.0.1:10001, pid {pid}) exited with code {code}"


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_standard_output_is_no_ones_channel(closed):
    """As a daemon, or cron, may start it."""
    lines = [f"os.write({3 - closed}, b'fine')", f"print('gone', file=open({closed}, 'w'))"]
    program = "; ".join(["import os, ms_kungfu as kf", "kf.init()", *lines])
    job = [sys.executable, "-m", "ms_kungfu.launcher", "-q", "-np", "1", sys.executable, "-c", program]
    command = shlex.join(job)
    done = subprocess.run(["bash", "-c", f"exec {command} {closed}>&-"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, (done.stdout, done.stderr)[2 - closed].strip()) == (0, "fine")


def test_quiet_silences_the_launcher_but_neither_workers_nor_the_cause(kungfu_run):
    job = kungfu_run("-q", "sh", "-c", "echo out; echo err >&2; exit 4")
    job.assert_exit(4)
    assert job.stdout == ["out"]
    assert job.stderr[0] == "err"
    assert re.fullmatch(r"kungfu-run: worker 0 \(127.0.0.1:10000, pid \d+\) exited with code 4", job.stderr[1])
    assert len(job.stderr) == 2


@pytest.mark.parametrize("watch", [(), ("-w", "-recover", "fail")], ids=["plain", "watch"])
@pytest.mark.parametrize("program", [FAMILY, DEAF], ids=["polite", "deaf"])
def test_killed_worker_ends_the_job_and_is_named(kungfu_run, script, watch, program):
    job = kungfu_run("-np", 3, *watch, *script(program))
    pid = int(started(job, 3)[2][2])
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    job.assert_exit(128 + signal.SIGKILL)
    job.assert_gone(begin)
    assert job.stderr[-1] == f"kungfu-run: worker 2 (127.0.0.1:10002, pid {pid}) was killed by SIGKILL"


@pytest.mark.parametrize("watch", [(), ("-w",)], ids=["plain", "watch"])
@pytest.mark.parametrize("shell", [False, True], ids=["direct", "below a shell"])
def test_killed_launcher_leaves_nothing(kungfu_run, script, watch, shell):
    command = script(DEAF)
    if shell:
        command = ("bash", "-c", shlex.join(command) + "; true")
    job = kungfu_run("-np", 3, *watch, *command)
    started(job, 3)
    # A process that has just become another program shows no environment for a moment, and isn't counted then.
    deadline = time.monotonic() + 20
    while len(job.processes()) < 2 + 3 * 3:
        assert time.monotonic() < deadline, job.processes()
        time.sleep(0.01)
    begin = time.monotonic()
    job.signal(signal.SIGKILL)
    job.assert_exit(-signal.SIGKILL)
    job.assert_gone(begin)


@pytest.mark.parametrize("watch", [[], ["-w"]], ids=["fixed", "watch"])
def test_killed_guard_ends_the_job(kungfu_run, script, watch):
    job = kungfu_run("-np", 2, *watch, *script(DEAF))
    started(job, 2)
    begin = time.monotonic()
    os.kill(guard_of(job), signal.SIGKILL)
    job.assert_exit(1)
    job.assert_gone(begin)
    assert "the guard process on host 127.0.0.1 was killed" in job.stderr[-1]


def test_a_command_may_have_as_many_words_as_the_system_takes(kungfu_run):
    kungfu_run("-np", 1, "true", *["y"] * 66_000).assert_exit(0)


def test_a_stopped_guard_does_not_keep_the_job_from_ending(kungfu_run, script):
    job = kungfu_run("-np", 2, "-grace-period", "1s", *script(DEAF))
    started(job, 2)
    begin = time.monotonic()
    os.kill(guard_of(job), signal.SIGSTOP)
    job.signal(signal.SIGINT)
    job.assert_exit(128 + signal.SIGINT)
    job.assert_gone(begin)


def test_killed_grandchild_is_the_workers_own_affair(kungfu_run):
    job = kungfu_run("bash", "-c", "sleep 1000 & echo child=$!; wait $!; echo status=$?; exit 5")
    os.kill(int(job.wait_for(r"child=(\d+)")[0][1]), signal.SIGKILL)
    job.assert_exit(5)
    assert "status=137" in job.stdout


@pytest.mark.parametrize("program", [FAMILY, DEAF], ids=["polite", "deaf"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ids=lambda n: n.name)
def test_signals_end_the_job(kungfu_run, script, number, program):
    job = kungfu_run("-np", 2, "-w", "-grace-period", "1s", *script(program))
    started(job, 2)
    begin = time.monotonic()
    job.signal(number)
    job.assert_exit(128 + number)
    job.assert_gone(begin)
    assert job.stderr[-1] == f"kungfu-run: interrupted by {number.name}"


def test_a_job_that_nohup_started_outlives_a_hangup(kungfu_run, script):
    job = kungfu_run("-np", 2, *script(FAMILY), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    started(job, 2)
    job.signal(signal.SIGHUP)
    job.signal(signal.SIGTERM)
    job.assert_exit(128 + signal.SIGTERM)


def test_signals_reach_the_workers_and_let_them_finish(kungfu_run, script):
    worker = script(
        "import signal, sys, time\n"
        "def save(number, frame):\n"
        "    print('saved on', signal.Signals(number).name, flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    job = kungfu_run("-np", 2, *worker)
    job.wait_for("^ready", 2)
    job.signal(signal.SIGINT)
    job.assert_exit(130)
    assert job.stdout.count("saved on SIGINT") == 2


@pytest.mark.timing
def test_second_signal_does_not_wait_for_deaf_workers(kungfu_run, script):
    job = kungfu_run(*script(DEAF))
    started(job, 1)
    job.signal(signal.SIGINT)
    job.wait_for("interrupted by SIGINT")
    begin = time.monotonic()
    job.signal(signal.SIGINT)
    job.assert_exit(130)
    assert time.monotonic() - begin < 0.9


def test_user_signals_are_passed_on(kungfu_run, script):
    worker = script(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    job = kungfu_run(*worker)
    job.wait_for("^ready")
    job.signal(signal.SIGUSR1)
    job.assert_exit(9)


def test_a_stopped_worker_does_not_hold_up_the_end(kungfu_run, script):
    save = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved', flush=True)))\n"
    job = kungfu_run("-np", 2, *script(save + FAMILY))
    os.kill(int(started(job, 2)[0][2]), signal.SIGSTOP)
    begin = time.monotonic()
    job.signal(signal.SIGTERM)
    job.assert_exit(143)
    job.assert_gone(begin)
    assert job.stdout.count("saved") == 2


def test_timeout_ends_the_job_with_124(kungfu_run, script):
    job = kungfu_run("-np", 2, "-timeout", "700ms", *script(DEAF))
    job.wait_for("still running after -timeout 0.7 s")
    begin = time.monotonic()
    job.assert_exit(124)
    job.assert_gone(begin)


def test_delay_can_be_interrupted(kungfu_run):
    job = kungfu_run("-delay", "1h", "true")
    job.wait_for("start delayed: seconds=3600")
    begin = time.monotonic()
    job.signal(signal.SIGTERM)
    job.assert_exit(143)
    job.assert_gone(begin)


def test_programs_that_cannot_run_are_named(kungfu_run, tmp_path):
    program = tmp_path / "no-interpreter"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    job = kungfu_run(program)
    job.assert_exit(127)
    assert f"can't run '{program}': No such file or directory" in job.stderr[-1]
    job = kungfu_run("no-such-program-anywhere")
    job.assert_exit(2)
    assert len(job.lines) == 1


# ---- output ----


def test_each_worker_has_its_log_files_with_exactly_what_it_wrote(kungfu_run, tmp_path):
    command = ("bash", "-c", r"printf 'out %s\npart' $RANK_ID; printf 'err \xff\n' >&2")
    job = kungfu_run("-q", "-np", 2, "-logdir", "logs/deep", *command)
    job.assert_exit(0)
    for rank in (0, 1):
        stem = tmp_path / "logs" / "deep" / f"127.0.0.1.1000{rank}"
        assert stem.with_name(stem.name + ".stdout.log").read_bytes() == f"out {rank}\npart".encode()
        assert stem.with_name(stem.name + ".stderr.log").read_bytes() == b"err \xff\n"
    assert kungfu_run("-q", "-np", 1, "-logdir", "logs/deep", "echo", "new").wait() == 0
    assert (tmp_path / "logs" / "deep" / "127.0.0.1.10000.stdout.log").read_text() == "new\n"


def test_launcher_log_goes_to_its_file(kungfu_run, tmp_path):
    job = kungfu_run("-logdir", "logs", "-logfile", "launcher.log", "sh", "-c", "exit 3")
    job.assert_exit(3)
    assert len(job.lines) == 1
    assert "worker 0 (127.0.0.1:10000, pid" in (tmp_path / "logs" / "launcher.log").read_text()


def test_workers_can_be_kept_off_the_screen(kungfu_run, tmp_path):
    job = kungfu_run("-q", "-v=false", "-logdir", "logs", "echo", "hello")
    job.assert_exit(0)
    assert job.lines == []
    assert (tmp_path / "logs" / "127.0.0.1.10000.stdout.log").read_text() == "hello\n"


def test_a_log_folder_that_cannot_be_made_is_named(kungfu_run, tmp_path):
    (tmp_path / "file").write_text("")
    job = kungfu_run("-logdir", "file/logs", "true")
    job.assert_exit(1)
    assert job.lines == ["kungfu-run: -logdir file/logs can't be written: Not a directory; give another folder"]
    job = kungfu_run("-logfile", "file/log", "true")
    job.assert_exit(1)
    assert job.lines == ["kungfu-run: -logfile file: File exists"]


def test_np_after_the_program_is_warned_of(kungfu_run):
    job = kungfu_run("true", "-np", "2")
    job.assert_exit(0)
    assert len(job.wait_for(r"^\[kungfu-run\] \S+ misuse: check=flags flag=-np\. ")) == 1
    job = kungfu_run("-np", "2", "true", "-np", "2")
    job.assert_exit(0)
    assert not [line for line in job.lines if "misuse" in line]


def test_mistyped_command_is_answered_with_the_likely_one(kungfu_run):
    job = kungfu_run("stauts")
    job.assert_exit(2)
    assert job.lines == ["kungfu-run: unknown command stauts; did you mean kungfu-run status?"]


def test_warning_before_the_job_begins_looks_like_the_others(kungfu_run):
    job = kungfu_run("-H", "none.invalid:2", "true", environment={"KUNGFU_JOIN_TIMEOUT": "0.2"})
    job.assert_exit(2)
    assert re.match(r"\[kungfu-run\] \d\d:\d\d:\d\d host name unknown: hosts=none\.invalid ", job.lines[0])


def test_the_launchers_lines_have_the_time(kungfu_run):
    job = kungfu_run("true")
    job.assert_exit(0)
    assert len(job.lines) >= 2
    assert all(re.match(r"\[kungfu-run\] \d\d:\d\d:\d\d \w", line) for line in job.lines), job.output


def test_log_that_cannot_be_written_is_reported_once_and_ends_no_worker(kungfu_run, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    os.mkfifo(logs / "127.0.0.1.10000.stdout.log")  # no process ever reads it
    (logs / "127.0.0.1.10001.stdout.log").mkdir()  # can't be opened
    (logs / "127.0.0.1.10002.stdout.log").symlink_to(tmp_path / "of somebody else")
    (tmp_path / "of somebody else").write_text("kept")
    job = kungfu_run("-np", 3, "-logdir", "logs", "sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.05; done")
    job.assert_exit(0)
    assert sorted(job.stdout) == sorted(f"line {i}" for i in (1, 2, 3) for _ in range(3))
    assert (tmp_path / "of somebody else").read_text() == "kept"
    told = sorted(line for line in job.stderr if "can't be written" in line)
    assert told == [
        "kungfu-run: log file logs/127.0.0.1.10000.stdout.log can't be written; the job continues without it: it is a "
        "FIFO or a socket, not a regular file",
        "kungfu-run: log file logs/127.0.0.1.10001.stdout.log can't be written; the job continues without it: Is a "
        "directory",
        "kungfu-run: log file logs/127.0.0.1.10002.stdout.log can't be written; the job continues without it: it is a "
        "symbolic link, not a regular file",
    ]


def test_workers_that_never_join_are_reported_as_copies(kungfu_run):
    job = kungfu_run("-np", 2, "sleep", 5)
    job.assert_exit(0)
    assert job.output.count("none of the 2 workers has joined the job within ") == 1, job.output
    assert job.output.count(", and all have ended: if they have trained, each has trained a separate model") == 1


@pytest.mark.parametrize(
    ("size", "lived_s", "has_granted", "is_told"),
    [(4, 60, False, True), (4, 60, True, False), (4, 1.9, False, False), (1, 60, False, False)],
)
def test_workers_that_ran_without_joining_are_reported_once(size, lived_s, has_granted, is_told, caplog):
    watch = CopiesWatch(lambda: False, lambda: has_granted, lambda: size, _since=100.0, clock=lambda: 100.0 + lived_s)
    for _ in range(2):
        watch.warn()
    told = "none of the 4 workers has joined the job within 60 s. If the program is still preparing"
    assert caplog.text.count(told) == is_told
    assert len(caplog.records) == is_told


def test_worker_without_descriptors_for_its_output_is_a_failed_worker(kungfu_run):
    def few_descriptors():
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    job = kungfu_run("-np", 30, "sh", "-c", "sleep 1000", preexec_fn=few_descriptors)
    job.assert_exit(126)
    assert re.fullmatch(
        r"kungfu-run: worker \d+ \(\S+\) was not started, because no pipe for its output could be created: "
        "Too many open files",
        job.stderr[-1],
    ), job.output
    job.assert_gone(time.monotonic())


def test_a_limit_under_which_nothing_runs_is_a_sentence(kungfu_run):
    few = (16, 16)
    job = kungfu_run("true", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few))
    job.assert_exit(1)
    assert job.output == "kungfu-run: 16 open files (ulimit -n) are too few; the minimum is 32"


def test_full_disk_under_logfile_is_reported_once(kungfu_run, tmp_path):
    (tmp_path / "launcher.log").symlink_to("/dev/full")
    job = kungfu_run("-np", 2, "-logfile", "launcher.log", "true")
    job.assert_exit(0)
    assert job.lines == [
        "kungfu-run: launcher.log can't be written; the job goes on without it: No space left on device"
    ]


def filled_terminal():
    """A terminal whose reader has stopped: both its ends, and the path to write to."""
    ours, theirs = pty.openpty()
    os.set_blocking(theirs, False)
    for _ in range(10):  # the kernel moves what is written on, and has room for more then
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(theirs, b"x" * 64)
        time.sleep(0.02)
    return ours, theirs, os.ttyname(theirs)


def test_logfile_on_a_stopped_terminal_blocks_no_signal(kungfu_run):
    ours, theirs, path = filled_terminal()
    try:
        job = kungfu_run("-logfile", path, "sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done")
        job.wait_for("^ready$")
        job.signal(signal.SIGTERM)
        job.assert_exit(128 + signal.SIGTERM, timeout=30)
    finally:
        os.close(theirs)
        os.close(ours)


def test_much_output_of_many_workers_keeps_its_lines_whole(kungfu_run, script):
    worker = script(
        "import os, sys\nfor i in range(20000):\n    print(f'{os.environ[\"RANK_ID\"]} {i} ' + 'x' * (i % 70))\n"
    )
    job = kungfu_run("-q", "-np", 3, *worker, environment={"PYTHONUNBUFFERED": ""})
    job.assert_exit(0)
    for rank in range(3):
        assert [line for line in job.stdout if line.startswith(f"{rank} ")] == [
            f"{rank} {i} " + "x" * (i % 70) for i in range(20000)
        ]


def test_output_arrives_when_it_is_written_also_without_a_line_end(kungfu_run, script):
    reading, writing = os.pipe()
    worker = script("import time; print('line'); print('part', end=''); time.sleep(1000)")
    kungfu_run("-q", *worker, stdout=writing)
    os.close(writing)
    received = b""
    while received != b"line\npart":
        received += os.read(reading, 100)
    os.close(reading)


def test_closed_output_reader_does_not_end_the_training(kungfu_run, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    log = "logs/127.0.0.1.10000.stdout.log"
    program = f"echo one; until grep -q one {log}; do sleep 0.01; done; echo two"
    job = kungfu_run("-logdir", "logs", "sh", "-c", program, stdout=writing)
    os.close(writing)
    job.assert_exit(0)
    assert (tmp_path / log).read_text() == "one\ntwo\n"


def test_a_terminal_that_takes_nothing_does_not_keep_the_job_from_ending(kungfu_run, script):
    reading, writing = os.pipe()
    try:
        worker = script("print('ready ' + 'x' * 10_000_000, flush=True)")
        job = kungfu_run("-timeout", "1s", *worker, stdout=writing)
        os.close(writing)
        job.assert_exit(124)
        job.assert_gone(time.monotonic())
    finally:
        os.close(reading)


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_signal_ends_the_wait_for_a_reader_after_the_workers(numbers, kungfu_run, script, tmp_path):
    reading, writing = os.pipe()
    worker = script("print('x' * 500_000, flush=True)")
    try:
        job = kungfu_run("-logfile", "log", *worker, stdout=writing)
        os.close(writing)
        while not (tmp_path / "log").exists() or "all workers have finished" not in (tmp_path / "log").read_text():
            time.sleep(0.01)
        assert job.process.poll() is None
        for number in numbers:
            job.signal(number)
        job.assert_exit(0, timeout=20)
        job.assert_gone(time.monotonic())
    finally:
        os.close(reading)


def test_lines_are_prefixed_and_coloured_on_a_terminal(kungfu_run):
    ours, theirs = pty.openpty()
    job = kungfu_run("-q", "-np", 2, "sh", "-c", "echo hello; echo oops >&2", stdout=theirs, stderr=theirs)
    os.close(theirs)
    job.assert_exit(0)
    received = b""
    with contextlib.suppress(OSError):  # EIO is how a terminal says that it is closed
        while True:
            received += os.read(ours, 4096)
    os.close(ours)
    lines = sorted(received.decode().splitlines())
    plain = [re.sub("\033\\[[0-9;]*[mK]", "", line) for line in lines]
    assert sorted(plain) == [f"[{rank}] {text}" for rank in (0, 1) for text in ("hello", "oops")]
    assert all(line.startswith("\033[3") for line in lines)


def test_prefix_in_a_pipe_is_given_by_its_flag(kungfu_run):
    job = kungfu_run("-q", "-np", 2, "-prefix", "host:rank", "sh", "-c", "echo hello; echo oops >&2")
    job.assert_exit(0)
    for lines, text in ((job.stdout, "hello"), (job.stderr, "oops")):
        assert sorted(lines) == [f"[127.0.0.1:{rank}] {text}" for rank in (0, 1)]


REPORTS = """
import os, time
from ms_kungfu import comm, init, membership
import numpy as np
init()
step = 0
while not os.path.exists("end"):
    step += 1
    comm.all_reduce(np.ones(1), name="x")
    report = {"step": step, "seconds": 0.1, "ended": 1, "samples": 8, "committed": 0.1, "p50": 0.1, "p99": 0.1}
    report.update(collectives=0.0, checkpoint=0.0, epoch=1, epochs=2, total_steps=9000000, loss=0.25)
    membership.report_steps(report)
    if step == 1:
        print("trains", flush=True)
    time.sleep(0.1)
    membership.step()
"""


def test_terminal_shows_the_progress_below_the_output_until_the_end(kungfu_run, script, tmp_path):
    terminal = Terminal(kungfu_run, "-np", 2, *script(REPORTS))
    row = r"step \d+/9000000 \(0%\) \| .* left \| .* samples/s \| loss 0\.25 \| epoch 1/2 \| 2 workers$"
    while not re.match(row, terminal.rows()[-1]):
        assert terminal.read(), terminal.rows()
    above = terminal.rows()[:-1]
    assert sorted(line for line in above if "trains" in line) == ["[0] trains", "[1] trains"]
    assert not any("worker started" in line for line in above)
    (tmp_path / "end").touch()
    while terminal.read():
        pass
    terminal.program.assert_exit(0)
    rows = terminal.rows()
    assert not any("epoch 1/2" in line for line in rows)
    assert sum("summary: " in line for line in rows) == 3
    assert "summary: goodput=" in rows[-1]


@pytest.mark.parametrize("flags", [["-q"], ["-progress=false"]])
def test_terminal_without_progress_has_no_status_line(kungfu_run, script, tmp_path, flags):
    (tmp_path / "end").touch()
    shown = Terminal(kungfu_run, "-np", 2, *flags, *script("import time; time.sleep(1.5); print('done')"))
    while shown.read():
        pass
    shown.program.assert_exit(0)
    assert b"\033[J" not in shown.received
    assert (b"worker started" in shown.received) == (flags != ["-q"])


# ---- the block about the failure that ends a job ----

FAILS = """
import os, time
print("begun", flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("no such file")
try:
    time.sleep(1000)
finally:
    pass
"""


@pytest.mark.parametrize("flags", [[], ["-q"], ["-q", "-v=false"]])
def test_failure_that_ends_the_job_is_shown_in_a_block(kungfu_run, script, flags):
    job = kungfu_run("-np", 2, *flags, *script(FAILS))
    job.assert_exit(1)
    began = next(i for i, line in enumerate(job.stderr) if line.startswith("---- "))
    block = job.stderr[began:]
    assert re.fullmatch(
        r"---- rank 1 \(127\.0\.0\.1, pid \d+\) failed first: it exited with code 1; its last 5 lines:", block[0]
    )
    assert [block[1], block[2], block[5]] == ["| begun", "| Traceback (most recent call last):",
                                              "| ValueError: no such file"]  # fmt: skip
    assert block[6] == "----"
    assert block[7].startswith("kungfu-run: worker 1 (")
    assert len(block) == 8


def test_single_worker_whose_output_is_shown_needs_no_block(kungfu_run, script):
    worker = script(FAILS.replace('== "1"', '== "0"'))
    for flags, blocks in ((["-q"], 0), (["-q", "-v=false"], 1)):
        job = kungfu_run(*flags, *worker)
        job.assert_exit(1)
        assert sum(line.startswith("---- rank 0 ") for line in job.stderr) == blocks


def test_interrupted_job_has_no_block(kungfu_run, script):
    job = kungfu_run("-np", 2, *script("import time; print('begun', flush=True); time.sleep(1000)"))
    job.wait_for("begun", 2)
    job.signal(signal.SIGTERM)
    job.assert_exit(128 + signal.SIGTERM)
    assert not [line for line in job.stderr if line.startswith("----")]


# ---- shared memory with a name ----

SHARES = """
import os, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
child = os.fork()  # it has the resource tracker's pipe, too
print(f"ready pid={os.getpid()} name={memory.name}" if child else "", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("who", ["worker", "launcher", "timeout"])
def test_shared_memory_of_a_killed_program_is_removed(kungfu_run, script, who):
    """Python's resource tracker does that, if it outlives the rest of its process group."""
    job = kungfu_run("-np", 2, *(["-timeout", "4s"] if who == "timeout" else []), *script(SHARES))
    found = job.wait_for(r"^ready pid=(\d+) name=(\S+)", 2)
    if who != "timeout":
        os.kill(int(found[0][1]) if who == "worker" else job.process.pid, signal.SIGKILL)
    job.process.wait(60)
    job.assert_gone(time.monotonic())  # the supervisor ends last
    left = [match[2] for match in found if os.path.exists(f"/dev/shm/{match[2]}")]
    assert not left
