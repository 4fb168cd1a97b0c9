"""Show a job live in a terminal (``kungfu-run top``)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, Callable

from ms_kungfu._flags import FlagParser, UsageError, failed
from ms_kungfu._processes import printing
from ms_kungfu.cluster_store import StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.memory import resident_bytes
from ms_kungfu.launcher.status_command import ANSWER_S, job_at, printable_job, readable
from ms_kungfu.launcher.status_socket import jobs_by_launcher

_PROGRAM = "kungfu-run top"
_LOOK_S = 1.0


class _NoJobError(Exception):
    """The requested job isn't found, or the user has several jobs and hasn't chosen one."""


def top(arguments: Sequence[str]) -> int:
    """Show a job until it ends or the user presses Ctrl-C. If standard output is a pipe, show the job once.

    Exit status: 0 if the job is shown, 1 if it isn't found, 2 if the command line is wrong or rich isn't installed.
    """
    parser = FlagParser(
        _PROGRAM,
        f"{_PROGRAM} [JOB] [flags]",
        "Shows a job live: its progress, workers, last changes, and which ranks wait for which. JOB is "
        "the process ID of a kungfu-run on this machine or the URL of a config server; by default your "
        "only job on this machine. Ctrl-C ends the display, not the job.",
    )
    parser.flag("secret-file", "file with the job's secret, if the job was started on another machine", metavar="FILE")
    try:
        flags, words = parser.parse_among(arguments)
        if len(words) > 1:
            raise UsageError(f"unexpected argument {words[1]!r}; give one job, or none")
        try:
            from ms_kungfu.launcher import top_view
        except ImportError:
            raise UsageError("rich is missing: pip install 'ms-kungfu[top]'") from None
        look = _finder(words[0] if words else None, flags.secret_file)
        first = look()
    except UsageError as error:
        return failed(_PROGRAM, error, 2)
    except StoreUnreachableError as error:
        return failed(_PROGRAM, error.question, 1)
    except (ConfigServerError, _NoJobError) as error:
        return failed(_PROGRAM, error, 1)
    with printing(_PROGRAM), contextlib.suppress(KeyboardInterrupt):
        if sys.stdout.isatty():
            top_view.show_live(first, _never_raises(look), _LOOK_S)
        else:
            top_view.show_once(first)
    return 0


def _finder(job: str | None, secret_file: str | None) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the job's status document.

    If the job runs only on this machine, the document also contains the memory of each process.
    """
    if job is not None and "://" in job:
        return lambda: printable_job(job_at(job, secret_file))
    if secret_file is not None:
        raise UsageError("-secret-file requires the URL of the job; give the URL, too")
    if job is not None and not (job.isascii() and job.isdigit() and len(job) < 20):
        raise UsageError(f"{job!r} is neither a process ID nor a URL; kungfu-run status lists the jobs")
    chosen = None if job is None else int(job)

    def look() -> dict[str, Any]:
        nonlocal chosen
        answers = {pid: readable(answer) for pid, answer in jobs_by_launcher(ANSWER_S, chosen)}
        found = {answer.get("job") or pid: (pid, answer) for pid, answer in answers.items() if "error" not in answer}
        if not found:
            if chosen in answers:
                raise ConfigServerError(answers[chosen]["error"])
            raise _NoJobError(
                "no job of this user runs on this machine" if chosen is None else f"no job of process {chosen} runs"
            )
        if len(found) > 1:
            listed = ", ".join(f"{pid} ({' '.join(answer['command'])})" for pid, answer in found.values())
            raise _NoJobError(f"{len(found)} jobs of this user run here; give one of {listed}")
        ((chosen, job),) = found.values()
        return printable_job(_with_memory(job))

    return look


def _with_memory(job: dict[str, Any]) -> dict[str, Any]:
    """If the job runs on this machine alone, add the memory of each process in bytes."""
    if len(job["hosts"]) == 1:
        for process in job["processes"]:
            process["memory"] = resident_bytes(process["pid"]) if process["pid"] else None
    return job


def _never_raises(look: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any] | None]:
    """Return a function like `look` that returns {"error": ...} if the job doesn't answer, and None if it has ended."""

    def found() -> dict[str, Any] | None:
        try:
            return look()
        except _NoJobError:
            return None
        except (StoreUnreachableError, ConfigServerError, UsageError) as error:
            return {"error": str(error)}

    return found
