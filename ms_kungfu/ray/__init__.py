"""Jobs on a Ray cluster: ``kungfu-run -engine ray``, and the same from Python.

It needs ``ms_kungfu[ray]``.
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

    What workers print comes to this process's output. Ctrl-C ends the job. It is ``KeyboardInterrupt``
    then, in the main thread.

    Args:
        command_or_function: what each worker runs. Either the words of a command (``["python",
            "train.py"]``), or a function without arguments, which cloudpickle pickles. The function
            runs in a process of its own, as the program would. Modules beside this program's script, or
            in ``sys.path[0]`` of this process, are found there if the folder is on the worker's node.
        num_workers: how many there are, or ``(least, most)``. With two numbers the job begins with what
            the cluster has resources for, and follows nodes that come and go.
        address: as for ``ray.init``, if the program hasn't called that yet. Without one it is the
            cluster of ``RAY_ADDRESS``, or one that runs here, or one for this call (``"local"``).
        cpus_per_worker: Ray's CPUs that each worker takes.
        gpus_per_worker: Ray's GPUs that each worker takes.
        npus_per_worker: Ray's NPUs that each worker takes.
        wait_s: how long to wait for the resources of the least number of workers, in seconds.
        flags: further ones of kungfu-run, ``["-recover=replace"]``.
        runtime_env: as for ``ray.init``, if the program hasn't called that yet.

    Returns:
        What the function has returned (whatever cloudpickle takes) at the workers that came to its end
        in the last cluster, by their ranks. Of a command an empty list.

    Raises:
        FunctionError: if a job of a function fails, with the rank and the exception of the worker that
            failed first. (A worker that just dies, and that the others go on without, is no failure.)
            `returncode` is kungfu-run's exit status, after a SIGTERM 143.
        subprocess.CalledProcessError: if a job of a command fails, with the same `returncode`; the base
            of FunctionError.
        KeyboardInterrupt: in the main thread, after Ctrl-C.
        RuntimeError: if the job can't start or Ray fails.
        ValueError: for an argument that makes no sense; before anything starts.
        TypeError: for an argument of another type, before anything starts. At the end, if what a worker
            has returned can't be pickled.
    """
    least, most = arguments.least_and_most(num_workers)
    words = ["-engine=ray", f"-np={least}", f"-min-np={least}", f"-max-np={most}"]
    words.append(f"-wait={arguments.amount('wait_s', wait_s):f}s")
    words += arguments.resources(cpus_per_worker, gpus_per_worker, npus_per_worker)
    if address is not None:
        if not isinstance(address, str):
            raise TypeError(f"address={address!r} is no text, like '10.0.0.1:6379'")
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
        raise ValueError("runtime_env is of ray.init, which has been called already; give it there")
    pickled = None
    if function is not None:
        try:
            pickled = pickle.dumps((_folders(), cloudpickle.dumps(function)))
        except Exception as error:  # any exception of a `__reduce__`
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
    """Return the folders of this program's own modules: beside its script, and those that it has put first."""
    folders = [sys.path[0]] if sys.path else []
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script and getattr(main, "__spec__", None) is None:  # of a module (-m) it is the folder of a package
        folders.append(os.path.dirname(script))
    return [*dict.fromkeys(os.path.abspath(folder) for folder in folders if folder)]
