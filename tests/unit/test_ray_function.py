"""What `ms_kungfu.ray.run` refuses, and what it makes of how its function has ended; without a Ray."""

from __future__ import annotations

import functools
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ms_kungfu import env
from ms_kungfu.ray import FunctionError, run
from ms_kungfu.ray.agent import FUNCTION
from ms_kungfu.ray.arguments import command_words, function_name, least_and_most
from ms_kungfu.ray.ends import End, end_by_error, end_by_value, failure, values
from ms_kungfu.ray.placing import ARGUMENTS, Node, too_small

# ---- arguments ----


def train():
    pass


def needs(path, rate=0.1, *more, key, **others):
    pass


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"command_or_function": "python sums.py"}, TypeError, "pass the command's words: ['python', 'sums.py']"),
        ({"command_or_function": None}, TypeError, "command_or_function=None is neither a function nor the words"),
        ({"command_or_function": ["python", 3]}, TypeError, "command_or_function=['python', 3] is neither"),
        ({"command_or_function": []}, ValueError, "command_or_function is empty"),
        ({"command_or_function": needs}, TypeError, "workers call needs without arguments, but it needs path, key"),
        ({"flags": "-recover=replace -q"}, TypeError, "pass a list: ['-recover=replace', '-q']"),
        ({"flags": 3}, TypeError, "flags=3 is not a list"),
        (
            {"num_workers": (1, 2, 3)},
            TypeError,
            "num_workers=(1, 2, 3) is neither a number nor a pair (minimum, maximum)",
        ),
        ({"num_workers": None}, TypeError, "num_workers=None is neither"),
        ({"num_workers": 1.5}, TypeError, "num_workers=1.5 is neither"),
        ({"num_workers": True}, TypeError, "num_workers=True is neither"),
        ({"num_workers": 0}, ValueError, "num_workers=0: a job needs at least 1 worker"),
        ({"num_workers": (3, 1)}, ValueError, "num_workers=(3, 1): the maximum, 1, is less than the minimum, 3"),
        ({"wait_s": -1}, ValueError, "wait_s=-1 is not an amount"),
        ({"wait_s": math.inf}, ValueError, "wait_s=inf is not an amount"),
        ({"wait_s": "10m"}, TypeError, "wait_s='10m' is not a number"),
        ({"cpus_per_worker": -1}, ValueError, "cpus_per_worker=-1 is not an amount"),
        ({"cpus_per_worker": 0}, ValueError, "cpus_per_worker=0: a worker needs more than 0"),
        ({"address": 6379}, TypeError, "address=6379 is not a string"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_their_names(arguments, error, told):
    with pytest.raises(error) as found:
        run(**{"command_or_function": train, **arguments})
    assert told in str(found.value)


def test_a_pair_may_be_a_list_and_a_word_a_path():
    assert least_and_most([1, 3]) == least_and_most((1, 3)) == (1, 3)
    assert least_and_most(2) == (2, 2)
    assert command_words(("python", Path("train.py"))) == ["python", "train.py"]


def test_a_function_goes_by_its_own_name():
    assert function_name(functools.partial(functools.partial(needs, 1), key=2)) == "needs"
    assert function_name(print) == "print"


def test_ray_cluster_too_small_for_a_call_is_reported_in_the_calls_terms():
    told = too_small([Node("n", "10.0.0.1", {"CPU": 3.0})], {"CPU": 1.0}, 50, 50, 0, "a:1", True, ARGUMENTS)
    assert told.startswith("num_workers=50 is more than the 3 workers that fit on the Ray cluster at a:1")
    assert "request a smaller num_workers, add nodes, or let it wait for some (wait_s=600)" in told
    assert told.endswith(
        '; this cluster was found running on this machine: address="local" starts a new cluster for this job only'
    )


# ---- ends ----


def returned(value, version=0, rank=0):
    return end_by_value(value, version, rank, 1.0, pickle.dumps)


def raised(error, rank, at):
    try:
        raise error
    except type(error) as caught:
        return end_by_error(caught, 0, rank, at, pickle.dumps)


class Unreadable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_values_returned_by_the_last_cluster_are_in_rank_order():
    ends = [returned("b", 2, 1), returned("old", 1, 2), returned("a", 2, 0), raised(ValueError("outlived"), 0, 0.0)]
    assert values("train", ends) == ["a", "b"]
    assert values("train", []) == []


def test_value_that_cannot_be_pickled_is_named_with_its_rank():
    ends = [returned(0), returned(lambda: 0, rank=1)]
    with pytest.raises(TypeError, match=r"train returned at rank 1 \(of builtins.function\) can't be pickled: "):
        values("train", ends)


def test_value_that_cannot_be_unpickled_is_named_with_its_rank():
    with pytest.raises(TypeError, match="train returned at rank 3 can't be unpickled: ModuleNotFoundError: No module"):
        values("train", [End("returned", 0, 3, 1.0, b"cno_such_module\nname\n.")])


def test_the_first_exception_is_the_failure():
    ends = [raised(OSError("followed"), 0, 2.0), raised(ValueError("began"), 2, 1.0), returned(0, rank=1)]
    error = failure("train", 1, ends)
    assert str(error) == "train has failed at rank 2: ValueError: began"
    assert (error.rank, error.error, error.returncode, error.cmd) == (2, "ValueError: began", 1, "train")
    assert isinstance(error.__cause__, ValueError)
    assert "in raised" in error.traceback
    assert isinstance(error, subprocess.CalledProcessError)  # which callers of old catch
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.traceback) == (str(error), error.traceback)


def test_exception_that_cannot_be_unpickled_is_reported_all_the_same():
    error = failure("train", 1, [raised(Unreadable(1, 2), 0, 1.0)])
    assert str(error) == "train has failed at rank 0: Unreadable: 1 and 2"
    assert error.__cause__ is None


def test_a_failure_without_an_exception_names_the_status():
    error = failure("train", 137, [returned(0)])
    assert str(error) == "train: training has failed, with exit status 137; see the reason in its last lines"
    assert (error.rank, error.returncode) == (None, 137)
    assert isinstance(error, FunctionError)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (functools.partial(signal.raise_signal, signal.SIGINT), False),
        (functools.partial(os.stat, "/no/such file"), True),
    ],
)
def test_a_worker_ends_quietly_by_an_interrupt_alone(tmp_path, function, told):
    """The driver has had the Ctrl-C, and says so."""
    pytest.importorskip("ray")
    (tmp_path / FUNCTION).write_bytes(pickle.dumps(([], pickle.dumps(function))))
    done = subprocess.run(
        [sys.executable, "-m", "ms_kungfu.ray._function"], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, env.RAY_FOLDER.name: str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (1, told), done.stderr
    assert told or not done.stderr


# ---- a Ray that doesn't answer ----


def test_nodes_are_waited_for_by_another_thread(monkeypatch):
    pytest.importorskip("ray")
    from ms_kungfu.ray import cluster

    answers, asked = queue.Queue(), []
    monkeypatch.setattr(cluster, "nodes", lambda: asked.append(1) or answers.get(timeout=60))
    watch = cluster.Watch()
    assert watch.silent_s() == 0
    assert watch.answer() is None
    assert watch.answer() is None
    assert watch.silent_s() > 0
    assert len(asked) == 1
    answers.put([Node("n", "10.0.0.1")])
    assert answer_of(watch) == [Node("n", "10.0.0.1")]
    assert watch.silent_s() == 0
    answers.put([])
    assert answer_of(watch) == []
    assert len(asked) == 2


def answer_of(watch):
    deadline = time.monotonic() + 60
    while (answer := watch.answer()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return answer


def test_a_call_that_ray_does_not_answer_is_left_behind():
    pytest.importorskip("ray")
    from ms_kungfu.ray import cluster

    ended = threading.Event()
    assert not cluster.in_time(lambda: ended.wait(60), 0.01)
    ended.set()
    assert cluster.in_time(lambda: 1 / 0, 60)
