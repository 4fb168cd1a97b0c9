"""What is to happen to the workers of a job, and where: written in one variable, done by the workers themselves.

    KUNGFU_FAULTS="kill rank=2 step=7 place=after_the_post:3; slow newcomer=0 place=parked seconds=0.2"

A line has a kind, a rank (``rank`` and ``step``, or ``from`` a step on, or ``newcomer``, counted in the order of their
start), and a place:

- ``kill`` (SIGKILL), ``stop`` (SIGSTOP; with ``seconds`` it is continued then), ``slow`` (it sleeps ``seconds``): at
  the n-th (``:n``, default first) time then that the worker comes to ``place``, one of `PLACES`, or of
  `COLLECTIVE_PLACES`, which are marked in the collectives and exist only in a build of the runtime for tests.
- ``refuse``: the worker's next request, to the ``broker`` or the ``config`` server, finds no connection; with
  ``_answer`` it arrives and the answer is lost.
- ``leave`` (SIGTERM to itself), ``evict`` (its neighbour asks for that), ``resize`` (``step`` and ``size``; all do).

What happened is left as a file ``fired.N`` for line N, with the process ID; nothing happens twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

PLACES_OF_A_START = ("imported", "parked")
PLACES_OF_A_STEP = ("begin", "computed", "reduced", "recorded", "end")
PLACES_OF_A_CHANGE = ("adopting", "granted", "entered", "sharing", "shared")
PLACES = (*PLACES_OF_A_START, *PLACES_OF_A_STEP, *PLACES_OF_A_CHANGE)
COLLECTIVE_PLACES = (
    "before_the_others_have_come", "after_a_staging_buffer_is_bound", "before_the_post", "after_the_post",
    "before_a_chunk_is_ready", "between_ready_and_done", "before_a_chunk_is_done", "before_a_chunk_is_reduced",
    "after_a_chunk_is_reduced", "before_it_leaves", "before_the_next_generation", "between_operations",
)  # fmt: skip
# Marked there, too, but a job whose ranks agree hardly comes to them, or to none at a step that can be named:
# tests/cpp/recovery_test.cc strikes at these.
RARE_PLACES = (
    "before_a_complaint", "after_a_complaint", "before_it_gives_up", "as_the_last_to_leave",
    "before_a_channel_is_declared", "after_a_channel_is_declared", "before_a_channel_has_its_key",
    "before_it_gives_a_channel_back", "before_it_takes_the_lock_of_the_table", "with_the_lock_of_the_table",
    "before_the_lock_of_the_table_is_given_back",
    "between_taking_a_staging_buffer_and_binding_it", "between_a_staging_buffer's_change_and_the_wake-up",
    "between_a_publish_and_its_wake-up", "when_it_has_closed_its_communicator", "when_it_has_retired_a_channel",
)  # fmt: skip
# Where a step is a deal of shards; tests/cpp/shards_test.cc strikes at these.
PLACES_OF_SHARDS = ("when_a_shard_is_added", "between_two_shards", "between_the_sums_of_a_step")
# Where an operation goes over several hosts, at a rank, and at its host's link, which is in the launcher's process;
# tests/hosts strikes at these.
PLACES_BETWEEN_HOSTS = (
    "before_it_tells_its_transport", "when_it_has_told_its_transport", "when_its_transport_has_its_contribution",
    "when_it_has_heard_the_commit", "before_it_contributes_again", "between_two_slices", "when_it_has_the_result",
    "before_it_reads_in_a_pinned_buffer", "before_it_lets_go_of_a_pinned_buffer",
)  # fmt: skip
PLACES_OF_A_LINK = (
    "before_the_hosts_meet", "when_it_has_said_its_word_to_a_host", "when_it_has_said_its_word",
    "when_the_hosts_have_met", "between_two_doublings",
    "between_two_pieces_of_the_ring", "before_a_sum_goes_on_around_the_ring", "before_a_piece_goes_on_in_its_tree",
    "when_it_has_the_hosts'_result", "when_all_hosts_have_the_result", "before_its_ranks_hear_the_commit",
    "before_its_ranks_get_the_result", "when_its_ranks_have_the_result", "before_its_ranks_contribute_again",
    "before_a_new_epoch",
)  # fmt: skip
CONNECTIONS = ("broker", "broker_answer", "config", "config_answer")
_PLACED = ("kill", "stop", "slow")
_KINDS = {"refuse": CONNECTIONS, "leave": ("",), "evict": ("",), "resize": ("",)}
_HOOK = "_ZN6kungfu10fault_hookE"  # kungfu::fault_hook, see ops_src/base/fault_point.h


@dataclass(frozen=True)
class Fault:
    """One line. `from_step`: also in all steps after `step`. `seconds` 0 of a stop: for ever."""

    kind: str
    rank: int | None = None
    step: int | None = None
    newcomer: int | None = None
    place: str = ""
    nth: int = 1
    seconds: float = 0.0
    size: int | None = None
    from_step: bool = False

    def __post_init__(self) -> None:
        places = (*PLACES, *COLLECTIVE_PLACES) if self.kind in _PLACED else _KINDS.get(self.kind)
        if places is None:
            raise ValueError(f"no fault is called {self.kind!r}")
        if self.place not in places:
            raise ValueError(f"{self.kind} has no place {self.place!r}; there are {', '.join(places)}")
        by_rank = self.rank is not None and self.step is not None
        if self.kind == "resize":
            if self.step is None or self.size is None:
                raise ValueError("resize needs step and size")
        elif by_rank == (self.newcomer is not None):
            raise ValueError(f"{self.kind} needs rank and step, or newcomer")
        if self.kind == "slow" and self.seconds <= 0:
            raise ValueError("slow needs seconds")

    def is_at(self, step: int) -> bool:
        return self.step is not None and (self.step <= step if self.from_step else self.step == step)

    @property
    def ends(self) -> bool:
        """Whether it costs the job a worker."""
        broker = self.kind == "refuse" and self.place.startswith("broker")
        return self.kind in ("kill", "leave", "evict") or (self.kind == "stop" and not self.seconds) or broker

    def __str__(self) -> str:
        words = [self.kind]
        for name in ("rank", "step", "newcomer", "size"):
            if getattr(self, name) is not None:
                words.append(f"{'from' if name == 'step' and self.from_step else name}={getattr(self, name)}")
        if self.place:
            words.append(f"place={self.place}" + (f":{self.nth}" if self.nth > 1 else ""))
        if self.seconds:
            words.append(f"seconds={self.seconds:g}")
        return " ".join(words)


def parse(text: str) -> tuple[Fault, ...]:
    """The script's lines; ValueError, which says what is wrong, for others."""
    faults = []
    for line in filter(None, (part.strip() for part in re.split(r"[;\n]", text))):
        kind, *words = line.split()
        values: dict[str, Any] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name == "place":
                values["place"], _, nth = value.partition(":")
                values["nth"] = int(nth or 1)
            elif name in ("rank", "step", "newcomer", "size"):
                values[name] = int(value)
            elif name == "from":
                values["step"], values["from_step"] = int(value), True
            elif name == "seconds":
                values[name] = float(value)
            else:
                raise ValueError(f"{line!r}: {name!r} means nothing")
        faults.append(Fault(kind, **values))
    return tuple(faults)


def to_text(faults: Iterable[Fault]) -> str:
    return "; ".join(map(str, faults))


def load_runtime(path: str) -> ctypes.CDLL:
    """The runtime's build for tests, in the place of the installed one: a user of the library finds it loaded."""
    return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _hook_to(at: Callable[[str], None]) -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda place: at(place.decode().replace(" ", "_")))


def mark_changes(at: Callable[[str], None]) -> None:
    """From now on `at` hears when the process comes to a place of a change that is in the package."""
    from ms_kungfu.membership import joining, step_agreement

    for module in (joining, step_agreement):
        _mark(module, "request_segment", at, before="adopting")
        _mark(module, "enter", at, before="granted", after="entered")


def _mark(module: Any, name: str, at: Callable[[str], None], before: str, after: str = "") -> None:
    function = getattr(module, name)

    def with_places(*args: object, **options: object) -> object:
        at(before)
        result = function(*args, **options)
        at(after)
        return result

    setattr(module, name, with_places)


class Strike:
    """Kills this process when it comes to the place that a file ``strike.PID`` names: ``PLACE``, or ``PLACE:N`` for the
    n-th time from when it is seen; stops it where the file is ``stop.PID``. Leaves ``struck.PID``, with the time of
    CLOCK_MONOTONIC. For all threads."""

    _LOOK_S = 0.01

    def __init__(self, folder: Path, runtime: ctypes.CDLL) -> None:
        self._orders = {
            signal.SIGKILL: folder / f"strike.{os.getpid()}", signal.SIGSTOP: folder / f"stop.{os.getpid()}"
        }  # fmt: skip
        self._told = folder / f"struck.{os.getpid()}"
        self._place, self._left, self._look_at, self._signal = "", 0, 0.0, signal.SIGKILL
        self._hook = _hook_to(self.at)
        ctypes.c_void_p.in_dll(runtime, _HOOK).value = ctypes.cast(self._hook, ctypes.c_void_p).value

    def at(self, place: str) -> None:
        now = time.monotonic()
        if not self._place and now >= self._look_at:
            self._look_at = now + self._LOOK_S
            for number, order in self._orders.items():
                with contextlib.suppress(FileNotFoundError):
                    self._place, _, nth = order.read_text().partition(":")
                    self._left, self._signal = int(nth or 1), number
        if place == self._place:
            self._left -= 1
            if self._left == 0:
                self._told.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), self._signal)


class Faults:
    """Does to this process what the script says. Used by one thread at a time."""

    def __init__(self, script: str, folder: Path, runtime: ctypes.CDLL) -> None:
        self._lines = list(enumerate(parse(script)))
        self._folder = folder
        self._armed: list[tuple[int, Fault]] = []
        self._left = {number: fault.nth for number, fault in self._lines}  # times more until it happens
        self._refused: list[tuple[int, Fault]] = []
        self._hook = _hook_to(self.at)
        self._slot = ctypes.c_void_p.in_dll(runtime, _HOOK)
        _on_connections(self._refuse)

    def newcomer(self) -> None:
        """This process was started for a job that is running."""
        for number in range(1000):
            if _claim(self._folder / f"newcomer.{number}"):
                self._arm([line for line in self._lines if line[1].newcomer == number])
                return

    def begin(self, rank: int, size: int, step: int) -> int | None:
        """A step begins. The size that is wanted from now on; None: as before."""
        self._arm([line for line in self._lines if line[1].rank == rank and line[1].is_at(step)])
        for number, fault in self._lines:
            if fault.kind == "evict" and fault.is_at(step) and rank == (fault.rank + 1) % size and fault.rank < size:
                self._evict(number, fault)
        for number, fault in self._lines:
            if fault.kind == "resize" and fault.step == step:
                self._note(number)
                return fault.size
        return None

    def _evict(self, number: int, fault: Fault) -> None:
        from ms_kungfu import membership
        from ms_kungfu.errors import ResizeError

        # It may be the last one that lives, or leaving already.
        with contextlib.suppress(ResizeError):
            if self._note(number):
                membership.evict(fault.rank)

    def _arm(self, mine: list[tuple[int, Fault]]) -> None:
        self._armed = [(number, fault) for number, fault in mine if fault.kind in _PLACED]
        self._refused += [line for line in mine if line[1].kind == "refuse" and line not in self._refused]
        in_collectives = any(fault.place in COLLECTIVE_PLACES for _, fault in self._armed)
        self._slot.value = ctypes.cast(self._hook, ctypes.c_void_p).value if in_collectives else None
        for number, fault in mine:
            if fault.kind == "leave" and self._note(number):
                os.kill(os.getpid(), signal.SIGTERM)

    def at(self, place: str) -> None:
        """The process comes to a place."""
        for number, fault in self._armed:
            if fault.place == place:
                self._left[number] -= 1
                if self._left[number] == 0 and self._note(number):
                    if fault.kind == "slow":
                        time.sleep(fault.seconds)
                    else:
                        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _refuse(self, place: str) -> bool:
        for number, fault in self._refused:
            if fault.place == place:
                self._refused.remove((number, fault))
                return self._note(number)
        return False

    def _note(self, number: int) -> bool:
        return _claim(self._folder / f"fired.{number}")


def _claim(path: Path) -> bool:
    """Whether this process is the first; the file has its ID, whole."""
    own = path.with_name(f"{path.name}-{os.getpid()}")
    own.write_text(str(os.getpid()))
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True


def _on_connections(refuse: Callable[[str], bool]) -> None:
    """From now on each request of this process to broker and config server asks `refuse` first."""
    import http.client

    from ms_kungfu import broker_protocol

    open_channel, receive = broker_protocol.BrokerClient._open, broker_protocol.Connection.receive_bytes
    connect, getresponse = http.client.HTTPConnection.connect, http.client.HTTPConnection.getresponse

    def refusing_channel(self: broker_protocol.BrokerClient, *args: Any) -> broker_protocol.Connection:
        if refuse("broker"):
            self.close()
            raise ConnectionRefusedError("refused by a fault")
        channel = open_channel(self, *args)
        channel.proven = True
        return channel

    def refusing_receive(self: broker_protocol.Connection) -> tuple[bytes, list[int]]:
        message, fds = receive(self)
        if getattr(self, "proven", False) and refuse("broker_answer"):
            for fd in fds:
                os.close(fd)
            raise ConnectionResetError("lost by a fault")
        return message, fds

    def refusing_connect(self: http.client.HTTPConnection) -> None:
        if refuse("config"):
            raise ConnectionRefusedError("refused by a fault")
        connect(self)

    def refusing_response(self: http.client.HTTPConnection) -> http.client.HTTPResponse:
        response = getresponse(self)
        if refuse("config_answer"):
            response.close()
            raise ConnectionResetError("lost by a fault")
        return response

    broker_protocol.BrokerClient._open, broker_protocol.Connection.receive_bytes = refusing_channel, refusing_receive
    http.client.HTTPConnection.connect, http.client.HTTPConnection.getresponse = refusing_connect, refusing_response
