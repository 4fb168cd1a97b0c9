"""Jobs of one user on one machine take different cores."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from ms_kungfu import _files
from ms_kungfu.launcher import core_claims
from ms_kungfu.launcher.affinity import Shares
from ms_kungfu.launcher.core_claims import CoreClaims, within

CORES = [0, 1, 2, 3]


def launcher(folder, quota=None, cores=CORES):
    return CoreClaims(lambda: list(cores), lambda: quota, [folder / "run"])


def begun(claims, each, workers):
    """The cores of the first workers, as the controller computes them from what the agent reports."""
    cores, taken = claims.begin(each, workers)
    return Shares(cores, each, taken).of(workers)


@pytest.mark.parametrize(
    ("taken", "count", "first", "cores"),
    [
        ((), 4, 3, [0, 1, 2, 3]),
        ((), 2, 0, [0, 1]),
        ((), 2, 3, [0, 3]),
        ((), 2, 7, [0, 3]),
        ((3,), 2, 3, [0, 1]),
        ((0, 1, 2), 2, 0, [0, 3]),
        ((0, 1, 2, 3), 2, 1, [1, 2]),
    ],
)
def test_quotas_cores_are_free_neighbours(taken, count, first, cores) -> None:
    assert within(CORES, taken, count, first) == cores


def test_jobs_take_different_cores_while_there_are_free_ones(tmp_path, caplog) -> None:
    first, second, third = (launcher(tmp_path) for _ in range(3))
    assert begun(first, 1, 2) == [[0], [2]]
    assert begun(second, 1, 1) == [[1]]
    assert third.look() == (CORES, (0, 1, 2))
    assert begun(third, 1, 2) == [[3], [0]]
    third.extend([3])
    assert "cores shared" not in caplog.text
    third.extend([0])
    third.extend([0, 1])
    assert caplog.text.count('cores shared: cpus=0 reason="other jobs of this user run on these"') == 1
    assert first.look() == (CORES, (0, 1, 3))


def test_job_that_divides_takes_all_free_cores_or_shares_all(tmp_path) -> None:
    first, second, third = (launcher(tmp_path) for _ in range(3))
    assert begun(first, 1, 1) == [[0]]
    assert begun(second, None, 1) == [[1, 2, 3]]
    assert begun(third, None, 2) == [[0, 1], [2, 3]]


def test_released_cores_are_free_again(tmp_path) -> None:
    first, second = launcher(tmp_path), launcher(tmp_path)
    first.begin(None, 1)
    assert second.look() == (CORES, (0, 1, 2, 3))
    first.narrow([1])
    assert second.look() == (CORES, (1,))
    del first
    assert second.look() == (CORES, ())


def test_two_jobs_on_one_core_both_hold_it(tmp_path) -> None:
    first, second, third = (launcher(tmp_path, cores=[5]) for _ in range(3))
    first.begin(None, 1)
    second.begin(None, 1)
    del first
    assert third.look() == ([5], (5,))


def test_launchers_at_one_moment_take_different_cores(tmp_path, monkeypatch) -> None:
    """The second one begins when the first one has looked, and hasn't claimed what it has found free."""
    taken, went_on = [], threading.Event()

    def sleep(_):
        went_on.set()
        time.sleep(0.001)

    def second():
        taken.append(begun(launcher(tmp_path), 1, 1))
        went_on.set()

    def quota_of_first():
        if not thread.is_alive() and not taken:
            thread.start()
            assert went_on.wait(20)

    thread = threading.Thread(target=second)
    monkeypatch.setattr(core_claims, "_LOCK_S", 20.0)
    monkeypatch.setattr(_files, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    first = CoreClaims(lambda: CORES, quota_of_first, [tmp_path / "run"])
    assert begun(first, 1, 1) == [[0]]
    thread.join(20)
    assert taken == [[[1]]]


def test_killed_launcher_releases_its_cores(tmp_path) -> None:
    program = (
        "import pathlib, sys\n"
        "from ms_kungfu.launcher.core_claims import CoreClaims\n"
        "claims = CoreClaims(lambda: [0, 1, 2, 3], lambda: None, [pathlib.Path(sys.argv[1])])\n"
        "print(claims.begin(1, 1), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    other = launcher(tmp_path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        assert other.look() == (CORES, (0,))
        process.kill()
    assert other.look() == (CORES, ())


def test_launcher_that_stands_still_with_the_lock_delays_no_other_for_long(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(core_claims, "_LOCK_S", 0.05)
    claims = launcher(tmp_path)
    fd = os.open(tmp_path / "run" / "cores", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert begun(claims, 1, 1) == [[0]]
    os.close(fd)


def test_without_a_folder_no_core_is_taken(tmp_path, caplog) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "run").write_text("no folder")
    first, second = launcher(tmp_path), launcher(tmp_path)
    assert begun(first, 1, 1) == begun(second, 1, 1) == [[0]]
    second.extend([0])
    assert caplog.text == ""


def test_quota_limits_the_jobs_cores(tmp_path) -> None:
    first, second = launcher(tmp_path, quota=1.5), launcher(tmp_path, quota=1.5)
    cores, taken = first.begin(None, 1)
    assert (len(cores), taken) == (2, ())
    others, taken = second.begin(None, 1)
    assert (len(others), taken) == (2, ())
    assert not set(cores) & set(others)
    assert first.look() == (cores, ())  # the same later
