"""What Python knows of a process that stands still: `ms_kungfu.membership.deadlocks`."""

import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest

from ms_kungfu.membership.deadlocks import (
    awaits_timer,
    begin_nothing,
    may_wait_for_others,
    place_in_program,
    waits_for_kernels,
    watch,
)
from ms_kungfu.membership.outside import OutsideWatch


def calls(module, inner, file="somewhere.py"):
    """A function of that module that calls `inner`."""
    names = {"__name__": module, "inner": inner}
    exec(compile("def function():\n    return inner()", file, "exec"), names)
    return names["function"]


@pytest.fixture
def frames_of():
    """The frames of a thread that has been started with a function of that module, and is in the last of `modules`."""
    end = threading.Event()
    threads = []

    def start(*modules):
        inside = threading.Event()

        def wait():
            inside.set()
            end.wait(60)

        function = wait
        for module in reversed(modules):
            function = calls(module, function)
        threads.append(threading.Thread(target=function))
        threads[-1].start()
        assert inside.wait(60)
        return {threads[-1].ident: sys._current_frames()[threads[-1].ident]}

    yield start
    end.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "modules", [("ms_kungfu.membership.x",), ("mindspore.dataset.engine", "users"), ("multiprocessing.queues",)]
)
def test_threads_of_the_packages_begin_nothing(frames_of, modules):
    assert begin_nothing(frames_of(*modules))


@pytest.mark.parametrize("modules", [("users",), ("users", "ms_kungfu.comm")])
def test_threads_of_the_user_may_begin_collectives(frames_of, modules):
    assert not begin_nothing(frames_of(*modules))


def test_idle_worker_of_an_executor_begins_nothing():
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        (thread,) = executor._threads
        for _ in range(1000):  # it may be on its way back to the queue
            if begin_nothing({thread.ident: sys._current_frames()[thread.ident]}):
                break
        else:
            pytest.fail("an idle worker is taken for one that begins collectives")


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ThreadPool])
def test_pool_that_runs_a_function_written_in_c_may_begin_collectives(pool):
    """Behind it, by the next task."""
    begun, end = threading.Event(), threading.Lock()
    end.acquire()
    before = set(threading.enumerate())
    with pool(1) as threads:
        start = threads.submit if pool is ThreadPoolExecutor else lambda f, *a: threads.apply_async(f, a)
        start(begun.set)
        task = start(end.acquire)
        try:
            assert begun.wait(60)
            new = {thread.ident for thread in set(threading.enumerate()) - before}
            for _ in range(60_000):  # the thread may be on its way from the one to the other
                if not begin_nothing({i: frame for i, frame in sys._current_frames().items() if i in new}):
                    break
                time.sleep(0.001)
            else:
                pytest.fail("a pool's thread is taken for one that begins nothing")
        finally:
            end.release()
        task.result(60) if pool is ThreadPoolExecutor else task.get(60)


def test_timer_that_runs_may_begin_collectives_by_its_handler(monkeypatch):
    running = {}
    monkeypatch.setattr(signal, "getitimer", lambda timer: running.get(timer, (0.0, 0.0)))
    assert not awaits_timer()
    running[signal.ITIMER_REAL] = (5.0, 0.0)
    assert awaits_timer()


def frame_in(*modules):
    function = sys._getframe
    for number, module in enumerate(reversed(modules)):
        function = calls(module, function, f"/home/user/file{len(modules) - number}.py")
    return function()


def test_main_thread_waits_for_kernels_in_calls_of_graphs_and_of_pynative():
    assert waits_for_kernels(frame_in("__main__", "mindspore.graph.api"))
    assert not waits_for_kernels(frame_in("mindspore.graph.api", "mindspore.dataset.engine.iterators"))
    assert not waits_for_kernels(frame_in("__main__"))
    assert not waits_for_kernels(None)


def test_place_is_the_innermost_line_of_the_program():
    assert place_in_program(frame_in("__main__", "users", "ms_kungfu.elastic.x", "mindspore.graph.api")) == "file2.py:2"
    assert place_in_program(None) == ""


class Core:
    """`_core`, whose third look ends the test."""

    def __init__(self, engine="none"):
        self.engine, self.looks, self.waits = engine, [], 0

    def await_slow_wait(self):
        self.waits += 1
        if self.waits > 2:
            raise InterruptedError

    def device_engine(self):
        return self.engine

    def look_for_deadlock(self, alone, main_waits, place):
        self.looks.append((alone, main_waits, place))


def test_watch_looks_as_long_as_a_thread_waits_slowly():
    core = Core()
    with pytest.raises(InterruptedError):
        watch(core)
    assert len(core.looks) == 2


def test_process_that_computes_on_a_device_is_never_alone():
    core = Core("vendor")
    with pytest.raises(InterruptedError):
        watch(core)
    assert [alone for alone, _, _ in core.looks] == [False, False]


@pytest.mark.parametrize(
    ("module", "function", "waits"),
    [
        ("ms_kungfu.comm", "all_reduce", True),
        ("mindspore.graph.api", "run", True),
        ("mindspore.graph.api", "compile", False),
        ("train", "evaluate", False),
    ],
)
def test_main_thread_in_kernels_may_wait_and_in_the_compiler_not(module, function, waits):
    names = {"__name__": module, "frame": sys._getframe}
    exec(f"def {function}():\n    return frame()", names)
    assert may_wait_for_others(names[function]()) == waits
    assert not may_wait_for_others(None)


def test_change_that_waits_outside_of_steps_is_logged_once_a_version():
    watch = OutsideWatch(30)
    assert watch.look(0, 1, 1, 7, waits=False) is None
    assert watch.look(50, 1, 2, 7, waits=False) is None  # prepared now
    assert watch.look(60, 1, 2, 8, waits=False) is None  # a step has ended
    assert watch.look(65, 1, 2, 8, waits=True) is None  # it waits for others
    assert watch.look(90, 1, 2, 8, waits=False) is None
    assert watch.look(95, 1, 2, 8, waits=False) == 30
    assert watch.look(200, 1, 2, 8, waits=False) is None
    assert watch.look(201, 1, 3, 8, waits=False) == 136
    assert watch.look(300, 3, 3, 8, waits=False) is None  # adopted
    assert watch.look(400, 3, 4, 8, waits=False) is None
