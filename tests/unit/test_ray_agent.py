"""What runs on each of Ray's nodes, where it can't start its host's kungfu-run; without a Ray."""

from __future__ import annotations

import errno
import os
import threading
from types import SimpleNamespace

import pytest

from ms_kungfu.ray import agent


def answer():
    """What `start` raises. A caller of an agent that says nothing would wait for ever."""
    told = []

    def start():
        try:
            agent.Agent().start(["-q"], {}, "/", 1.0, None)
        except ValueError as error:
            told.append(str(error))

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(10)
    (sentence,) = told
    assert sentence.startswith("kungfu-run can't be started on ")
    return sentence.rpartition(": ")[2]


@pytest.fixture(autouse=True)
def on_a_node(monkeypatch):
    monkeypatch.setattr(agent, "_has_working_dir", lambda: True)
    monkeypatch.setattr(agent, "_own_cpus", lambda: 1.0)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.E2BIG])
def test_an_agent_that_gets_no_process_says_so(monkeypatch, number):
    def no_process(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(agent, "subprocess", SimpleNamespace(Popen=no_process, DEVNULL=None, PIPE=None))
    assert answer() == os.strerror(number)


@pytest.mark.parametrize("had", [0, 1, 2])
def test_an_agent_that_gets_no_thread_says_so(monkeypatch, had):
    """It needs three."""
    made = []

    class Thread(threading.Thread):
        def start(self):
            if len(made) == had:
                raise RuntimeError("can't start new thread")
            made.append(self)
            super().start()

    processes = SimpleNamespace(Popen=lambda *_, **__: SimpleNamespace(stdout=None, stderr=None), DEVNULL=0, PIPE=0)
    monkeypatch.setattr(agent, "threading", SimpleNamespace(Thread=Thread, Event=threading.Event))
    monkeypatch.setattr(agent, "subprocess", processes)
    monkeypatch.setattr(agent.Agent, "_read", lambda *_: None)
    assert answer() == "can't start new thread"
