"""A worker's side of a change of membership.

The ranks of a cluster agree on the next version through the communicator that they have; then each asks its host's
broker for that version's segment and joins it. `docs/architecture.md` has the whole protocol. All functions but
:func:`evict` belong to the thread that trains; none may run while another collective of this process is under way.

Nothing hangs on a particular rank. Once a step all ranks agree, by one small all-reduce, on the newest version that
the launcher has announced, on a size that somebody wishes for, and on what became of that wish. The lowest rank that
lives files the wish at the config server, in the background; if it dies, the next one does so again and finds what the
first may have written already. A version is announced once everybody who is new in it is ready, so nobody waits for a
newcomer's start.

Asynchronous trainings meet only for a reason
---------------------------------------------
Ranks that make their steps at their own speed can't agree once a step. Each looks, after its step, at two words of the
segment, and goes on (:func:`meeting_is_due`). Only where these say so do all come together: :func:`enter_meeting`,
what the training has to agree on, then :func:`follow_meeting`, which is the agreement above.

- `announced`, written by the launcher: a version newer than this cluster's. So arrive deaths, evictions, ``kungfu-run
  resize``, and sizes that were filed.
- `meetings`, raised by any member: how many meetings have been asked for. A rank asks for the one after those that it
  has been to, where its schedule wants a size, a wish can't be filed, a checkpoint is due, or it has made all its
  steps.

Both only grow, so a reason that one rank has seen is seen by every other one after its present step at the latest, and
stays until they have met. A rank that enters a meeting waits there and asks for no other. So all ranks go to the same
meetings in the same order, whatever each came for: what it came for is in what it brings. A meeting waits for the
slowest rank's present step, and for no more.

- Where a rank dies, before a meeting or in it, the others' operations end without it (docs/recovery.md). If it had
  asked for the meeting, they meet for nothing and go on. Its death becomes a version, which is a reason.
- The lowest living rank files a wish after its own steps, without a meeting. If it dies the next one does so again: all
  know the wish from the meeting that it was told in, and keep it until they hear in a meeting that it was filed.
- A new version begins with its own number and no meetings.
- A rank that has made all its steps asks for a meeting and waits in it, and with that meeting training ends for all:
  nobody goes on, in other collectives or out of its process, where others still expect it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Callable

import numpy as np
from numpy.typing import NDArray

from ms_kungfu import _core, env
from ms_kungfu.broker_protocol import BrokerClient, Detached, Granted, Stay
from ms_kungfu.cluster import MAX_WORKERS, Cluster, PeerID
from ms_kungfu.cluster_store import StaleVersionError, StoreUnreachableError, open_store
from ms_kungfu.errors import KungFuError, PeerLostError, ResizeError

_log = logging.getLogger(__name__)
_FIRST_PORT, _LAST_PORT = 10000, 10999  # KungFu's default range
_MAX = 3  # the reduction, see comm.OPS
_RETRY_S = 0.2
_POLL_S = 0.001
_GIVE_UP_MARGIN_S = 10.0  # the launcher gives newcomers up first, and announces a version without them
_MAX_REFUSAL_BYTES = 1024
_NICE_OF_THE_DETACHED = 10
_LEAVING_S = 10.0  # a program that has ended by then need not be told that it has left
_ALL_BITS = (1 << 64) - 1


Settle = Callable[[bool], bool]


@dataclass(frozen=True)
class Change:
    """What a step or resize did to the membership."""

    changed: bool
    detached: bool
    old_size: int
    new_size: int
    lost: tuple[int, ...] = ()  # ranks of the old cluster that had died
    undone: bool = False  # the step at hand doesn't count, and is done again (`ElasticTraining.step_end`)


class Reductions:
    """What came of the reductions of this process since its owner last asked, in one cluster version.

    Each owner has its own: a training isn't told less because a dataset has asked meanwhile."""

    def __init__(self, of: _State | None = None) -> None:
        self._gradient = self._any = self._commits = self._first = self._last = 0
        (_state if of is None else of).reductions.add(self)

    @staticmethod
    def _look() -> None:
        gradient, latest, commits, first, last = _core.take_reductions()
        for each in _state.reductions:
            each._gradient, each._any = max(each._gradient, gradient), max(each._any, latest)
            each._commits, each._first, each._last = each._commits + commits, each._first or first, last or each._last

    def _latest(self) -> int:
        """The generation in which the last gradient reduction ended; where there was none, the last all-reduce."""
        return max((self._gradient or self._any) - 1, 0)

    def take_participants(self) -> list[int]:
        """See the function of this name."""
        self._look()
        latest = self._latest()
        self._gradient = self._any = 0
        return list(_core.members_of(latest))

    def take_commits(self) -> tuple[int, list[int]]:
        """How many gradient reductions there were, and the ranks that died between them: they took part in the first,
        whose update is done, and not in the last. The reductions of a plan's groups, which are of one mind, are one."""
        self._look()
        commits, first, last = self._commits, self._first, self._last
        self._commits = self._first = self._last = 0
        if first == last:
            return commits, []
        stayed = _core.members_of(last - 1)
        return commits, [rank for rank in _core.members_of(first - 1) if rank not in stayed]

    @staticmethod
    def take_outcome() -> list[int]:
        """Who took part in the last reductions that somebody has not asked for, as the cluster version ends."""
        Reductions._look()
        latest = max(each._latest() for each in _state.reductions)
        participants = list(_core.members_of(latest))
        for each in _state.reductions:
            each._gradient = each._any = each._commits = each._first = each._last = 0
        return participants


@dataclass
class _State:
    """What this process knows of its membership; None and False before :func:`join` or :func:`park`."""

    self_id: PeerID | None = None
    incarnation: int = 0
    cluster: Cluster | None = None
    parked: bool = False
    entering: bool = False
    detached: bool = False
    received: bool = True
    wish: int | None = None  # a size that all ranks want and that nobody has filed yet
    filed: tuple[int, int] | None = None  # the last wish that was filed, and its version
    proposal: _Proposal | None = None  # at the rank that files the wish
    given_up: int = 0  # the newest version that was announced and that nobody goes over to any more
    met: int = 0  # meetings of this cluster version that this process has come to
    broker: BrokerClient | None = None
    training_step: int | None = None  # for the launcher's lines
    reductions: weakref.WeakSet[Reductions] = field(default_factory=weakref.WeakSet)  # all owners' of this process
    outcomes: dict[int, list[int]] = field(default_factory=dict)  # see participants_of; some bytes for each version
    row: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(5, np.uint64))

    def __post_init__(self) -> None:
        self.of_nobody = Reductions(self)  # for those who have none of their own


_state = _State()
_joining = threading.RLock()


# ---- joining and leaving ----


def _broker() -> BrokerClient:
    if _state.broker is None:
        _state.broker = BrokerClient.from_environment()
    return _state.broker


def _hang_up() -> None:
    if _state.broker is not None:
        _state.broker.close()


def _segment(member_of: int | None, version: int | None, timeout: float | None) -> Granted | Detached | Stay:
    peer, incarnation = identity()
    return _broker().request_segment(peer, incarnation, member_of, version, timeout, _state.training_step)


def _enter(granted: Granted, has_state: bool) -> None:
    try:
        _core.join(
            granted.fd,
            granted.rank,
            str(granted.peer),
            has_state,
            env.COLLECTIVE_TIMEOUT.get(),
            env.JOIN_TIMEOUT.get(),
        )
    finally:
        os.close(granted.fd)
    _state.cluster = granted.cluster
    _state.given_up = _state.met = 0


def _enter_first(granted: Granted | Detached | Stay) -> None:
    if not isinstance(granted, Granted):
        # The cluster shrank again before this process was ready.
        _detach(None)
        return
    _state.self_id, _state.incarnation = granted.peer, granted.incarnation
    _enter(granted, has_state=False)
    # In the first cluster everyone starts alike, with nothing to receive. A newcomer has to, also where those who have
    # the state died in that moment: to train from the beginning would lose theirs in silence.
    _state.received = not _state.parked
    _leave_on_sigterm()


def _detach(version: int | None) -> None:
    _state.detached = True
    _hang_up()
    _step_back()
    _tell_who_works_on()
    _core.leave("this process has been detached from the cluster" + (f" at version {version}" if version else ""))


def _step_back() -> None:
    """Lets those who train go first on the cores that this process shares with them: it has nothing to do but end."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), _NICE_OF_THE_DETACHED))


def _tell_who_works_on() -> None:
    """Tells a program that goes on for long after this worker has left that it could have asked."""
    left = time.monotonic()

    def tell() -> None:
        time.sleep(_LEAVING_S)
        _log.warning(
            "this worker left the cluster %.0f s ago and still works; nobody waits for it, and it is ended when its "
            "place is needed or the job ends. ms_kungfu.detached() tells a program that it has left: it should skip "
            "what only a worker of the cluster does, such as an evaluation at the end",
            time.monotonic() - left,
        )

    threading.Thread(target=tell, name="kungfu-left", daemon=True).start()


def begin() -> None:
    """Joins the cluster that this process was started for, or, where the job is running already, gets ready to.

    Called once, by :func:`ms_kungfu.runtime.init`.
    """
    global _state
    own, standby = env.SELF.get(), env.STANDBY.get()
    if own is None and standby is None:
        raise ValueError("KUNGFU_BROKER is set but KUNGFU_SELF is not; start the program with kungfu-run")
    _state = _State(None if own is None else PeerID.parse(own), env.INCARNATION.get())
    if env.PARKED.get():
        _state.parked, _state.received = True, False
        _core.set_join_handler(join)
        return
    _enter_first(_segment(member_of=None, version=None, timeout=env.JOIN_TIMEOUT.get()))


def join() -> None:
    """Where this process is parked: says that it is ready, and waits for its place, however long the members train on.

    The first collective does so itself. Afterwards :func:`is_detached` tells whether it is needed no more. Idempotent;
    thread-safe.
    """
    with _joining:
        if not _state.parked or _state.entering:
            return
        standby = env.STANDBY.get()
        if standby is None:
            granted = _segment(member_of=None, version=None, timeout=None)
        else:
            granted = _broker().request_identity(standby)
        # Other threads that come to a collective meanwhile wait for the lock; this one passes through.
        _state.entering = True
        try:
            _enter_first(granted)
        finally:
            _state.entering = False
        _state.parked = False
        _core.set_join_handler(None)


def is_parked() -> bool:
    """Whether this process was started for a running job and has not joined it yet. Rank and size are provisional."""
    return _state.parked


def forget() -> None:
    """Back to a process without a cluster."""
    global _state
    _core.set_join_handler(None)
    _hang_up()
    _state = _State()


def evict(rank: int) -> None:
    """Asks that `rank` of the present cluster leave it; the others go on without it from one of the next steps on.

    Any worker may call it, at any time and from any thread; it is not a collective. If several ask for the same rank,
    it leaves once. The worker that leaves finds :func:`is_detached` true after its step and should exit with 0.

    Raises:
        ValueError: where there is no such rank.
        ResizeError: if it can't leave: it is the last one, fewer than ``-min-np`` would be left, or the launcher does
            not follow changes (``-w``). The job goes on as it is.
    """
    join()
    cluster = _state.cluster
    size = 1 if cluster is None else cluster.size
    if not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} in a cluster of {size}")
    if cluster is None:
        raise ResizeError("a cluster that kungfu-run has not started stays at 1 rank")
    _broker().request_leave(cluster.workers[rank], env.JOIN_TIMEOUT.get())


# ---- SIGTERM: leave at the next step ----

_owner: int | None = None  # the process that the handler is meant for
_leaving = False


def _leave_on_sigterm() -> None:
    """A worker that is told to end, e.g. because its machine is needed, leaves the cluster after its present step."""
    global _owner
    if (
        _owner is None
        and env.WATCH.get()
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a program that has its own handler knows better
    ):
        _owner = os.getpid()
        signal.signal(signal.SIGTERM, _on_sigterm)
        # A child of this process is no worker: SIGTERM ends it, as whoever sends it one expects.
        os.register_at_fork(after_in_child=_be_mortal)


def _be_mortal() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _leaving
    if _leaving or _state.detached:  # twice means at once
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    _leaving = True
    threading.Thread(target=_ask_to_leave, name="kungfu-leave", daemon=True).start()


def _ask_to_leave() -> None:
    try:
        assert _state.self_id is not None
        _broker().request_leave(_state.self_id, _GIVE_UP_MARGIN_S, terminated=True)
    except (KungFuError, AssertionError):
        # The job is ending, or there is nobody to go on: SIGTERM does what it would do without a handler.
        os.kill(os.getpid(), signal.SIGTERM)


# ---- what to change to ----


class _Proposal(threading.Thread):
    """Files a wish for a size at the config server, in the background and, while it is away, again and again."""

    def __init__(self, cluster: Cluster, size: int, dead: list[PeerID]) -> None:
        super().__init__(name="kungfu-propose", daemon=True)
        self.size = size
        self.version: int | None = None  # under which it was filed
        self.refusal = ""
        self.trouble = ""
        self.settled = threading.Event()  # one of these is known
        self.cancelled = False
        self._cluster = cluster
        self._dead = dead
        self.start()

    def run(self) -> None:
        while not self.cancelled:
            try:
                self.version = _propose(self._cluster, self.size, self._dead)
            except StoreUnreachableError as error:
                if not self.trouble:
                    self.trouble = str(error)
                    _log.warning("%s; the change to %d workers waits, training goes on", error, self.size)
                self.settled.set()
                time.sleep(_RETRY_S)
                continue
            except Exception as error:
                # Whatever it is, the others have to be told.
                known = isinstance(error, (KungFuError, ValueError))
                self.refusal = str(error) if known else f"{type(error).__name__}: {error}"
            self.settled.set()
            return


def _propose(cluster: Cluster, size: int, dead: list[PeerID]) -> int:
    """Writes a cluster of `size` workers to the config server and returns its version."""
    url, secret = env.CONFIG_SERVER.get(), env.JOB_SECRET.get()
    if url is None:
        raise ResizeError("resizing needs a config server: start the job with kungfu-run -w, which embeds one")
    if not env.WATCH.get():
        raise ResizeError("resizing needs a launcher that follows the config server: start it with kungfu-run -w")
    hosts = env.HOSTS.get()
    slots = None if hosts is None else sum(hosts.values())
    if size > MAX_WORKERS:
        raise ResizeError(f"{size} workers were asked for, one host can have {MAX_WORKERS}")
    if slots is not None and size > slots:
        given = ",".join(f"{host}:{count}" for host, count in (hosts or {}).items())
        raise ResizeError(f"{size} workers were asked for, -H {given} has {slots} slots")
    ports = env.PORT_RANGE.get() or range(_FIRST_PORT, _LAST_PORT + 1)
    store = open_store(url, secret)
    while True:
        # The server may hold a newer version than this cluster has adopted; a wish for a size builds on the newest.
        newest = store.get() or cluster
        if newest.version > cluster.version and newest.size == size:
            return newest.version
        try:
            return store.put(newest.resized(size, ports, dead, hosts)).version
        except StaleVersionError:
            continue  # somebody else wrote in between, so there was progress


# What became of a wish, as one number of which the ranks take the maximum: kind, size wished for, and the version under
# which it was filed or the rank that knows why not.
_NOTHING, _LATER, _FILED, _REFUSED = range(4)


def _pack(kind: int, size: int, value: int) -> int:
    return kind << 60 | size << 44 | value


def _unpack(packed: int) -> tuple[int, int, int]:
    return packed >> 60, packed >> 44 & 0xFFFF, packed & (1 << 44) - 1


def _pursue_wish(wait: bool, must: bool) -> int:
    """At the lowest living rank: files the wish there is, and tells what became of it, packed."""
    proposal, rank = _state.proposal, int(_core.rank())
    if _state.wish is None or _core.living()[0] != rank or _state.cluster is None:
        _drop_proposal()
        return _pack(_NOTHING, 0, 0)
    if proposal is None or proposal.size != _state.wish:
        _drop_proposal()
        living = set(_core.living())
        dead = [worker for i, worker in enumerate(_state.cluster.workers) if i not in living]
        proposal = _state.proposal = _Proposal(_state.cluster, _state.wish, dead)
    if wait:
        proposal.settled.wait()
    if proposal.version is not None:
        return _pack(_FILED, proposal.size, proposal.version)
    if must and proposal.trouble:
        proposal.cancelled, proposal.refusal = True, proposal.trouble
    if proposal.refusal:
        return _pack(_REFUSED, proposal.size, rank)
    return _pack(_LATER if proposal.trouble else _NOTHING, proposal.size, 0)


def _drop_proposal() -> None:
    if _state.proposal is not None:
        _state.proposal.cancelled = True
        _state.proposal = None


def _refusal_of(rank: int) -> str | None:
    """Why `rank` can't file the wish; None where it has died since, and the next one has to try."""
    buffer = np.zeros(_MAX_REFUSAL_BYTES, np.uint8)
    if rank == int(_core.rank()) and _state.proposal is not None:
        text = _state.proposal.refusal.encode()[:_MAX_REFUSAL_BYTES]
        buffer[: len(text)] = np.frombuffer(text, np.uint8)
    try:
        _core.broadcast("kungfu/refusal", buffer, buffer, rank)
    except PeerLostError:
        if rank in _core.living():
            raise
        return None
    return buffer.tobytes().rstrip(b"\0").decode(errors="replace")


def _follow(wait: bool, must: bool = False, word: int = 0, settle: Settle | None = None) -> Change:
    """Moves to the version that the ranks agree on. With `wait`, not before the wish has come true or can't; with
    `must` a config server that is away is an error. `word` and `settle` are those of :func:`step`."""
    present, version = int(_core.size()), int(_core.cluster_version())
    row = _state.row
    ready = True
    while True:
        # The greatest of a word and of its complement: they belong together where all ranks bring the same.
        row[:] = (int(_core.announced_version()), _state.wish or 0, _pursue_wish(wait, must), word, word ^ _ALL_BITS)
        _core.all_reduce("kungfu/step", row, row, _MAX)
        if settle is not None:
            if settle(int(row[3]) == int(row[4]) ^ _ALL_BITS):
                return Change(False, False, present, present)
            settle = None
        announced, wish = int(row[0]), int(row[1])
        kind, size, value = _unpack(int(row[2]))
        _state.wish = wish or None
        if kind == _REFUSED:
            refusal = _refusal_of(value)
            if refusal is None:
                continue
            _drop_proposal()
            _state.wish = None
            raise ResizeError(refusal)
        if kind == _FILED:
            _drop_proposal()
            _state.filed = (size, value) if value > version else None
            if size == wish:
                _state.wish = None
        filed = _state.filed[1] if _state.filed is not None else None
        if announced > max(version, _state.given_up) and (not wait or filed is None or announced >= filed):
            change = _adopt(announced)
            if change is not None:
                return change
        if not ready:
            _state.filed = None
            raise ResizeError(f"cluster version {filed} did not become ready within {_patience_s():g} s")
        if wait and filed is not None:
            ready = _await_announcement(max(filed, _state.given_up + 1))
        elif not wait or kind == _LATER or _state.wish is None:
            return Change(False, False, present, present)


def _patience_s() -> float:
    return env.JOIN_TIMEOUT.get() + _GIVE_UP_MARGIN_S


def _await_announcement(version: int) -> bool:
    deadline = time.monotonic() + _patience_s()
    while int(_core.announced_version()) < version:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _adopt(version: int) -> Change | None:
    """Moves to cluster `version`, on which all present members have agreed. None at all of them where nobody does: it
    was superseded meanwhile, or those who would have carried the state over are dead."""
    old_size, old_version = int(_core.size()), int(_core.cluster_version())
    granted = _segment(old_version, version, env.JOIN_TIMEOUT.get())
    if isinstance(granted, Stay):
        _state.given_up = version
        return None
    lost = tuple(lost_ranks())
    _drop_proposal()
    _state.outcomes[old_version] = Reductions.take_outcome()
    if isinstance(granted, Detached):
        _detach(version)
        return Change(True, True, old_size, old_size, lost)
    _enter(granted, has_state=_state.received)
    new_size = granted.cluster.size
    if _state.filed is not None and _state.filed[1] <= version:
        _state.filed = None
    if _state.wish == new_size:
        _state.wish = None
    return Change(True, False, old_size, new_size, lost)


def _not_started(size: int) -> ResizeError:
    remedy = "start it with kungfu-run -w"
    return ResizeError(f"a cluster that kungfu-run has not started stays at 1 rank, {size} were asked for; {remedy}")


def change_size(size: int) -> tuple[bool, bool]:
    """The runtime's resize handler: all ranks have agreed on `size`, which is not the present size."""
    if _state.cluster is None:
        raise _not_started(size)
    _state.wish, _state.filed = size, None
    change = _follow(wait=True, must=True)
    return change.changed, change.detached


def resize(size: int) -> Change:
    """Collective: changes the cluster to `size` ranks; see :func:`ms_kungfu.runtime.resize`."""
    join()
    if size < 1:
        raise ValueError(f"a cluster has at least 1 rank, got size {size}")
    old_size = int(_core.size())
    changed, detached = _core.resize(size)
    return Change(changed, detached, old_size, int(_core.size()))


def step(size: int | None = None, wait: bool = False, word: int = 0, settle: Settle | None = None) -> Change:
    """Collective, once a step: moves to the newest version that is wanted and ready.

    Args:
        size: the size wanted from now on, e.g. by a schedule; where ranks differ, the largest counts. It is filed at
            the config server, and the cluster changes at one of the next steps, once the newcomers are ready. None
            keeps the present wish; what somebody else writes to the config server (``kungfu-run resize``) is followed
            in any case, and so is a cluster without those who died.
        wait: go on only when the size wanted is there, as KungFu's resize does, rather than train meanwhile. The same
            at all ranks.
        word: anything below 2**64 that is to be compared with the other ranks' (see the next one).
        settle: called before the cluster changes, at all ranks or at none, with whether all have brought the same
            word. It may be collective. Where it returns true, the same at all ranks, the cluster stays as it is in this
            step; what it raises leaves this function, the cluster as it was.

    While the config server is away, wishes wait for it, and training goes on.

    Raises:
        ResizeError: at every rank, if the change isn't possible; the cluster is as before.
    """
    join()
    if size is not None and not 1 <= size <= 0xFFFF:
        raise ValueError(f"a cluster has at least 1 rank, got size {size}")
    if _has_no_cluster(size):
        if settle is not None:
            settle(True)
        return no_change()
    if size is not None:
        _want(size)
    return _follow(wait, word=word, settle=settle)


def _has_no_cluster(size: int | None) -> bool:
    """Whether this process has left, or was never in a cluster that could change. ResizeError where the latter wants
    another `size`."""
    if _state.cluster is None and not _state.detached and size is not None and size != int(_core.size()):
        raise _not_started(size)
    return _state.cluster is None or _state.detached


def no_change() -> Change:
    """That the cluster stays as it is, or stays left."""
    present = int(_core.size())
    return Change(False, _state.detached, present, present)


# ---- without meeting once a step ----


def note_step(number: int) -> None:
    """The training is at this step: a change of the cluster is told with it."""
    _state.training_step = number


def meeting_is_due(size: int | None = None, call: bool = False) -> bool:
    """Whether all ranks are about to meet, so that this one has to :func:`enter_meeting` now. Not collective; some
    atomic loads where nothing is to be done.

    Args:
        size: the size that this rank wants from now on. If nobody has wanted it yet this asks for a meeting.
        call: ask for one in any case.

    Raises:
        ResizeError: where there is nobody who could change the size.
    """
    join()
    if _has_no_cluster(size):
        return call
    call = call or (size is not None and size != _wanted_size()) or _file_wish() == _REFUSED
    if call:
        _core.call_meeting(_state.met + 1)
    known = max(int(_core.cluster_version()), _state.given_up)
    return call or int(_core.meetings()) > _state.met or int(_core.announced_version()) > known


def enter_meeting() -> None:
    """This rank has come to the meeting that was due. What follows is collective."""
    _state.met += 1


def follow_meeting(size: int | None) -> Change:
    """Collective, in a meeting: moves to the newest version that is ready; afterwards `size`, the same at all ranks, is
    wanted. Raises as :func:`step` does."""
    if _has_no_cluster(None):
        return no_change()
    try:
        return _follow(wait=False)  # first: it tells everybody what was filed already
    finally:
        if size is not None and not _state.detached:
            _want(size)
            _file_wish()


def _wanted_size() -> int:
    if _state.wish is not None:
        return _state.wish
    return _state.filed[0] if _state.filed is not None else int(_core.size())


def _want(size: int) -> None:
    pending = _state.filed[0] if _state.filed is not None else int(_core.size())
    _state.wish = None if size == pending else size


def _file_wish() -> int:
    """At the lowest living rank: has the wish filed, if there is one. The kind of what became of it."""
    return _NOTHING if _state.wish is None else _unpack(_pursue_wish(wait=False, must=False))[0]


# ---- what this process is ----


def take_participants() -> list[int]:
    """The ranks of the present cluster that took part in the gradient reductions since the last call, sorted; all where
    there was none. The same at all of these ranks."""
    return _state.of_nobody.take_participants()


def participants_of(version: int) -> list[int] | None:
    """What `take_participants` had to tell when the cluster left this version; None where this process wasn't in it."""
    return _state.outcomes.get(version)


def set_weight(samples: int) -> None:
    """How many samples the next gradients of this worker stand for: means over the workers are weighted by it."""
    _core.set_weight(samples)


def sync_root() -> int:
    """The lowest rank that has the training state; 0 in a cluster where everyone starts alike."""
    root, size = int(_core.state_root()), int(_core.size())
    return root if root < size else 0


def is_first_cluster() -> bool:
    """Whether this is the cluster that the job began with, all of whose processes run their programs from the start."""
    return not env.PARKED.get() and not _state.detached and cluster_version() == _state.incarnation


def is_joiner() -> bool:
    """Whether this process joined a running job and has not received the training state yet."""
    return not _state.received


def state_received() -> None:
    """Tells that this process now has the training state."""
    _state.received = True


def identity() -> tuple[PeerID, int]:
    """This process's name in the job, and the cluster version that it was started for."""
    if _state.self_id is None:
        raise KungFuError("this process was not started by kungfu-run, so it has no name in a job")
    return _state.self_id, _state.incarnation


def peer_of(rank: int) -> PeerID | None:
    """The peer of this rank in the present cluster."""
    workers = () if _state.cluster is None else _state.cluster.workers
    return workers[rank] if rank < len(workers) else None


def lost_ranks() -> list[int]:
    """The ranks of the present cluster that have died; they count until the next version."""
    living = _core.living()
    return [] if len(living) == int(_core.size()) else sorted(set(range(int(_core.size()))).difference(living))


def speaks_for_all() -> bool:
    """Whether this process is the lowest living rank: what all would tell alike is told by one."""
    return not _state.detached and not _state.parked and int(_core.living()[0]) == int(_core.rank())


def is_detached() -> bool:
    return _state.detached


def rank() -> int:
    """The rank; as long as this process is parked, the one it was started for."""
    return env.RANK_ID.get() if _state.parked else int(_core.rank())


def size() -> int:
    """The number of ranks; as long as this process is parked, of the cluster it was started for."""
    return env.RANK_SIZE.get() if _state.parked else int(_core.size())


def cluster_version() -> int:
    return _state.incarnation if _state.parked else int(_core.cluster_version())


def local_rank() -> int:
    """The rank among the workers of this host."""
    if _state.parked:
        return env.RANK_ID.get()
    if _state.cluster is None or _state.self_id is None:
        return 0
    same_host = [w for w in _state.cluster.workers if w.host == _state.self_id.host]
    return same_host.index(_state.self_id) if _state.self_id in same_host else 0


def local_size() -> int:
    """The number of workers on this host."""
    if _state.parked:
        return env.RANK_SIZE.get()
    if _state.cluster is None or _state.self_id is None:
        return 1
    return sum(w.host == _state.self_id.host for w in _state.cluster.workers)


def uid() -> int:
    if _state.self_id is not None:
        return _state.incarnation << 16 | _state.self_id.port
    own = env.SELF.get()
    if own is not None:
        return env.INCARNATION.get() << 16 | PeerID.parse(own).port
    return (env.STANDBY.get() or 0) << 16
