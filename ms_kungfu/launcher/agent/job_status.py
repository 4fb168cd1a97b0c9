"""Report the job's status: what the controller reports, or what this host knows if the controller doesn't answer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from dataclasses import dataclass
from typing import Any, Callable

from ms_kungfu.config_server.secret_file import SecretFileError
from ms_kungfu.launcher.agent.leading import OwnController
from ms_kungfu.launcher.agent.succession import Succession
from ms_kungfu.launcher.agent.supervisor import Supervisor
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.state.outline import outline
from ms_kungfu.launcher.state.states import JobState
from ms_kungfu.launcher.status_socket import Answer
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

_log = logging.getLogger(__name__)
_ANSWER_S = 2.0


@dataclass(eq=False)
class JobStatusAnswer:
    """Answer status queries on this host.

    `send` sends a message to the controller. `is_connected` returns whether there is a connection to a controller.
    """

    options: Options
    started_at: float
    own: OwnController
    succession: Succession
    send: Callable[[m.FromHost], None]
    is_connected: Callable[[], bool]

    def __post_init__(self) -> None:
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)

    async def ask(self) -> dict[str, Any]:
        if self.own.controller is not None:
            return self.own.controller.status()
        if self.own.has_ended:
            return {"error": f"the job of process {os.getpid()} is just ending"}
        head = self.succession.head_name
        if not self.is_connected():
            if self.succession.since is None:
                return outline(self.options, JobState.STARTING, f"waits for {PROGRAM} on {head}", self.started_at)
            why = f"the controller on {head} has failed; this host waits for the next controller"
            return outline(self.options, JobState.RUNNING, why, self.started_at)
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(m.StatusQuestion(number))
            return await within(_ANSWER_S, answer)
        except asyncio.TimeoutError:
            why = f"{PROGRAM} on {head}, which controls the job, doesn't answer"
            return outline(self.options, JobState.RUNNING, why, self.started_at)
        finally:
            del self._questions[number]

    def hear(self, said: m.JobStatus) -> None:
        question = self._questions.get(said.number)
        if question is not None and not question.done():
            question.set_result(said.job)


def serve_status(machine: Machine, supervisor: Supervisor, answer: Answer) -> Callable[[], None]:
    """Answer status queries until the caller calls the returned function or the launcher ends.

    If this host can't answer status queries, the job continues nevertheless.
    """
    try:
        server = machine.serve_status(answer)
    except (OSError, SecretFileError) as error:
        _log.warning('status unavailable: error="%s". kungfu-run status does not list this job', error)
        return lambda: None
    supervisor.remove_at_end(server.path, server.inode)
    return server.close
