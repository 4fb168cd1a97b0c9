"""What runs on each of Ray's nodes, where it can't start its host's kungfu-run; without a Ray."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from ms_kungfu.ray import agent


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.E2BIG])
def test_an_agent_that_gets_no_process_says_so(monkeypatch, number):
    """Whoever waits for its answer would wait for ever."""

    def no_process(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(agent, "_has_working_dir", lambda: True)
    monkeypatch.setattr(agent, "_own_cpus", lambda: 1.0)
    monkeypatch.setattr(agent.subprocess, "Popen", no_process)
    answers = []

    def start():
        try:
            agent.Agent().start(["-q"], {}, "/", 1.0, None)
        except ValueError as error:
            answers.append(str(error))

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(10)
    (answer,) = answers
    assert answer.startswith("kungfu-run can't be started on ")
    assert answer.endswith(f": {os.strerror(number)}")
