"""The membership state of this process, and the interfaces through which it reaches the outside world.

Each process has one :class:`Member`, which :func:`current` returns. The fault simulator runs several members in one
process, and gives each member its own context (`contextvars`) and its own :class:`Ports`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from statistics import median
from typing import Any, Callable, TypeVar

from ms_kungfu import _core
from ms_kungfu._run_time import run_time
from ms_kungfu.broker_protocol import BrokerClient
from ms_kungfu.cluster import MAX_WORKERS, MAX_WORKERS_OF_HOSTS, Cluster, PeerID
from ms_kungfu.cluster_store import ClusterStore, open_store
from ms_kungfu.env import Variable
from ms_kungfu.membership.reductions import Outcomes

T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """How a step or a resize has changed the cluster."""

    changed: bool
    detached: bool
    old_size: int
    new_size: int
    lost: tuple[int, ...] = ()  # failed ranks of the old cluster
    before: Cluster | None = None  # the cluster before the change
    after: Cluster | None = None
    undone: bool = False  # whether the step was undone and must be repeated (`ElasticTraining.step_end`)

    @property
    def is_of_the_same_workers(self) -> bool:
        """Return whether both clusters are known to have the same workers. Their hosts may still differ."""
        return self.before is not None and self.after is not None and self.before.workers == self.after.workers

    @property
    def hosts_joined(self) -> list[str]:
        return _more_hosts(self.after, self.before)

    @property
    def hosts_left(self) -> list[str]:
        return _more_hosts(self.before, self.after)


def _more_hosts(one: Cluster | None, other: Cluster | None) -> list[str]:
    """Return the hosts of `one` that `other` doesn't have."""
    if one is None or other is None:
        return []
    others = {runner.host for runner in other.runners}
    return [runner.host for runner in one.runners if runner.host not in others]


class EndedSteps:
    """The number of the last step that has ended, and how long steps take."""

    def __init__(self) -> None:
        self.last: int | None = None
        self._began: float | None = None  # when the current step began; None before the first step has ended
        self._durations: deque[float] = deque(maxlen=8)

    def ended(self, step: int, now: float) -> None:
        if self._began is not None:
            self._durations.append(now - self._began)
        self.last, self._began = step, now

    def resume(self, now: float) -> None:
        """Record that the next step begins now. The time since the end of the last step doesn't count."""
        if self._began is not None:
            self._began = now

    @property
    def each_s(self) -> float:
        """The median duration of the last steps in seconds, which a compilation doesn't distort; 0 if unknown."""
        return _median(self._durations)

    @property
    def last_s(self) -> float:
        """The duration of the last step in seconds; 0 if unknown."""
        return self._durations[-1] if self._durations else 0.0

    @property
    def last_took_longer_s(self) -> float:
        """Return how many seconds longer the last step took than the median of the steps before; 0 if unknown."""
        before = list(self._durations)[:-1]
        return max(0.0, self.last_s - _median(before)) if before else 0.0


def _median(durations: Collection[float]) -> float:
    return max(0.0, median(durations)) if durations else 0.0


def _start_thread(name: str, function: Callable[[], None]) -> None:
    threading.Thread(target=function, name=name, daemon=True).start()


@dataclass(frozen=True)
class Ports:
    """A member's interfaces to the outside world, which the fault simulator replaces."""

    core: Any = _core
    environ: Mapping[str, str] | None = None  # None means the environment of the process
    broker: Callable[[], BrokerClient] = BrokerClient.from_environment
    store: Callable[[str, str | None, str], ClusterStore] = open_store
    monotonic: Callable[[], float] = run_time  # doesn't count times when this process was stopped
    sleep: Callable[[float], None] = time.sleep
    event: Callable[[], threading.Event] = threading.Event
    start_thread: Callable[[str, Callable[[], None]], None] = _start_thread
    close: Callable[[int], None] = os.close
    max_workers: int = MAX_WORKERS  # the limit if the job has one host
    max_workers_of_hosts: int = MAX_WORKERS_OF_HOSTS
    poll_s: float = 0.001
    owns_process: bool = True  # whether the member may change the process's signal handlers and priority


class Member:
    """The membership state of one process.

    Attributes are None or False until :func:`ms_kungfu.membership.begin` or :func:`ms_kungfu.membership.join` sets
    them.
    """

    def __init__(self, ports: Ports | None = None) -> None:
        self.ports = Ports() if ports is None else ports
        self.core = self.ports.core
        self.outcomes = Outcomes(self.core)
        self.joining = threading.RLock()
        self.begun = False  # whether `ms_kungfu.runtime.init` has returned
        self.cores_fixed = False  # whether `cores.fix_cores` has returned
        self._broker: BrokerClient | None = None
        self.reset()

    def reset(self, self_id: PeerID | None = None, incarnation: int = 0) -> None:
        """Reset to the state of a process named `self_id` before it joins a cluster. Keep the `Reductions` objects."""
        self.hang_up()
        self._broker = None
        self.self_id = self_id
        self.incarnation = incarnation
        self.cluster: Cluster | None = None
        self.deferred = False  # whether this process was started for a running job and hasn't joined yet
        self.parents_answers: Any = None  # in a child process of a worker, a `children.Answers`
        self.entering = False
        self.detached = False
        self.evicted = False  # whether this process is detached because a worker or a user evicted it
        self.terminated = False  # whether this process got a SIGTERM and has therefore asked to leave
        self.received = True  # whether this process has the training state
        # Whether this process has joined while the other workers are waiting for it in a later training call.
        self.catching_up = False
        self.requested_size: int | None = None  # a size that all ranks have requested but that isn't in the store yet
        self.pending: tuple[int, int] | None = None  # (size, version) of the cluster last written to the store
        self.request: Any = None  # the `SizeRequest`, on the rank that writes `requested_size`
        self.superseded = 0  # the newest prepared version that the members have skipped
        self.sync_points = 0  # number of sync points that this process has entered in this cluster version
        self.training_step: int | None = None  # for the launcher's log lines
        self.ended_steps = EndedSteps()
        self.spent: dict[str, float] = {}  # activity -> seconds spent on it
        self.activity = 0  # see `reports.doing`
        self.outcomes.by_version.clear()

    def get(self, variable: Variable[T]) -> T:
        """Return the value of an environment variable."""
        return variable.get(self.ports.environ)

    def broker(self) -> BrokerClient:
        """Return a client of the host's broker. Raise ResizeError if kungfu-run hasn't started this process."""
        if self._broker is None:
            self._broker = self.ports.broker()
        return self._broker

    @property
    def has_broker(self) -> bool:
        """Return whether this process has a client of the broker."""
        return self._broker is not None

    def hang_up(self) -> None:
        if self._broker is not None:
            self._broker.close()

    def speaks_first(self) -> bool:
        """Return whether this process is the lowest living rank."""
        return int(self.core.living()[0]) == int(self.core.rank())


_current: ContextVar[Member] = ContextVar("kungfu_member", default=Member())  # noqa: B039


def current() -> Member:
    return _current.get()


def use(member: Member) -> None:
    """Make `member` the process's member in the current context."""
    _current.set(member)
