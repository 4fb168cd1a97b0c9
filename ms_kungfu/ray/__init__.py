"""Run jobs on a Ray cluster, with ``kungfu-run -engine ray`` or with `run` from Python.

This package needs Ray, which ``pip install 'ms_kungfu[ray]'`` installs.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Callable

from ms_kungfu._flags import UsageError
from ms_kungfu.launcher.engine_flags import EngineRequest
from ms_kungfu.launcher.options import parse_command_line
from ms_kungfu.ray import arguments
from ms_kungfu.ray.ends import End, FunctionError, failure, values

__all__ = ["FunctionError", "run"]
MISSING = "the engine ray needs Ray: pip install 'ms_kungfu[ray]'"
_RUNS_A_FUNCTION = ("python3", "-m", "ms_kungfu.ray._function")


def run(
    command_or_function: Sequence[str] | Callable[[], Any],
    num_workers: int | tuple[int, int] = 1,
    *,
    address: str | None = None,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    npus_per_worker: float = 0,
    wait_s: float = 0,
    flags: Sequence[str] = (),
    runtime_env: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Train on a Ray cluster, and return when the job has ended and Ray has its resources back.

    The workers' output is written to this process's output. Ctrl-C ends the job and raises
    ``KeyboardInterrupt`` in the main thread.

    Args:
        command_or_function: the program of each worker: either a command as a list of words
            (``["python", "train.py"]``), or a function without parameters, which is pickled with
            cloudpickle. The function runs in a separate process. It can import modules from the
            folder of this program's script, and from ``sys.path[0]`` of this process, if these
            folders exist on the worker's node.
        num_workers: the number of workers, or ``(least, most)``. With two numbers, the job begins with
            as many workers as the cluster has resources for. If nodes join or leave, the number
            changes.
        address: the cluster's address, as for ``ray.init``. It has no effect if the program has
            called ``ray.init`` already. By default the job runs on the cluster that ``RAY_ADDRESS``
            names. If ``RAY_ADDRESS`` isn't set, the job runs on a running cluster on this machine.
            If no cluster is running, a new cluster is started for this call, as with ``"local"``.
        cpus_per_worker: the number of Ray CPUs per worker.
        gpus_per_worker: the number of Ray GPUs per worker.
        npus_per_worker: the number of Ray NPUs per worker.
        wait_s: how many seconds to wait for the resources of the minimum number of workers.
        flags: further flags of kungfu-run, for example ``["-recover=replace"]``.
        runtime_env: as for ``ray.init``. It must be None if the program has called ``ray.init``
            already.

    Returns:
        The function's return values, sorted by rank, from the workers in the last cluster that
        completed the function. A value can be anything that cloudpickle can pickle. For a command, the
        result is an empty list.

    Raises:
        FunctionError: a job that runs a function has failed. The error contains the rank and the
            exception of the worker that failed first. If other workers survive a worker's failure,
            the job hasn't failed. `returncode` is kungfu-run's exit status, for example 143 after a
            SIGTERM.
        subprocess.CalledProcessError: a job that runs a command has failed. `returncode` is
            kungfu-run's exit status. This class is the base class of FunctionError.
        KeyboardInterrupt: the user has pressed Ctrl-C; raised in the main thread.
        RuntimeError: the job can't start, or Ray fails.
        ValueError: an argument is invalid. The error is raised before anything starts.
        TypeError: an argument has the wrong type (raised before anything starts), or a worker's
            return value can't be pickled (raised at the end).
    """
    least, most = arguments.least_and_most(num_workers)
    words = ["-engine=ray", f"-np={least}", f"-min-np={least}", f"-max-np={most}"]
    words.append(f"-wait={arguments.amount('wait_s', wait_s):f}s")
    words += arguments.resources(cpus_per_worker, gpus_per_worker, npus_per_worker)
    if address is not None:
        if not isinstance(address, str):
            raise TypeError(f"address={address!r} is not a string like '10.0.0.1:6379'")
        words.append(f"-address={address}")
    function, name = None, ""
    if callable(command_or_function):
        function, name, command = command_or_function, arguments.function_name(command_or_function), [*_RUNS_A_FUNCTION]
        arguments.check_function(function)
    else:
        command = arguments.command_words(command_or_function)
    try:
        request = parse_command_line([*words, *arguments.further_flags(flags), "--", *command])
    except UsageError as error:
        raise ValueError(str(error)) from None
    assert isinstance(request, EngineRequest)
    if find_spec("ray") is None:
        raise RuntimeError(MISSING)
    import ray
    from ray import cloudpickle

    from ms_kungfu.ray.driver import JobError
    from ms_kungfu.ray.driver import run as run_job
    from ms_kungfu.ray.placing import ARGUMENTS

    if runtime_env is not None and ray.is_initialized():
        raise ValueError("runtime_env has no effect, because ray.init has been called already; pass it to ray.init")
    pickled = None
    if function is not None:
        try:
            pickled = pickle.dumps((_folders(), cloudpickle.dumps(function)))
        except Exception as error:  # a `__reduce__` method may raise anything
            raise TypeError(f"{name} can't be pickled: {error}") from error
    try:
        outcome = run_job(request, pickled, runtime_env, ARGUMENTS)
    except JobError as error:
        raise RuntimeError(str(error)) from None
    if outcome.signals[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt
    if function is None:
        if outcome.code:
            raise subprocess.CalledProcessError(outcome.code, command)
        return []
    ends = [End(*pickle.loads(each)) for each in outcome.returned]
    if outcome.code:
        raise failure(name, outcome.code, ends)
    return values(name, ends)


def _folders() -> list[str]:
    """Return the folders from which this program imports its own modules: sys.path[0] and the script's folder."""
    folders = [sys.path[0]] if sys.path else []
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script and getattr(main, "__spec__", None) is None:  # with -m, the script's folder is a package
        folders.append(os.path.dirname(script))
    return [*dict.fromkeys(os.path.abspath(folder) for folder in folders if folder)]
