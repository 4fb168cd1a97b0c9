"""How a controller acquires its leadership lease, renews it, and writes the snapshot that the lease guards.

An entry is one new state of the snapshot.

1. Only the controller writes the snapshot. It writes one entry at a time (under the lock), so each entry builds on the
   previous one. The controller notifies workers or hosts of an entry only after the store has accepted the entry.
   (`test_simulated_leadership.py`.)
2. If a write shows that another controller has the lease, this controller steps down. It discards the decisions that
   it hasn't sent yet. Its term never resumes, even if the other controller fails.
3. Renewals wait in the same queue as entries, because the lease handles one call at a time.
4. Members may wait for an entry, and therefore for the store. If the write of an entry fails or takes long, the
   members' deadlines stop until the entry has been written (`on_store_awaited`). The deadlines also stop after a
   renewal has failed, or has taken more than half the duration of the lease. A slightly slow renewal stops no deadline,
   because renewals are frequent, and members seldom depend on one.
5. If the controller fails at any moment, the lease expires. The next controller carries out the decisions in the
   snapshot. No process knows of any other decision.
6. A controller that gives up the lease although its host is alive (`step_down`) first writes an entry that records
   this. The entry contains no other change, because a change could be half of a decision. The next controller waits for
   this host as for any other host. The hosts of other earlier controllers count as silent, because their leases expired
   or their launchers are ending (`leave`). If the other hosts were paused as well, an expired lease doesn't show that
   its holder is silent. So after a pause, a host first gives the last holder a moment to reacquire a free lease
   (`Succession._follow`). (`test_a_broken_protocol_is_found_out`.)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Collection
from typing import Any, Callable

from ms_kungfu._run_time import MOST_GAP_S
from ms_kungfu.cluster_store import LeadershipGoneError, LeadershipLostError, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.controller.revisions import raise_bugs
from ms_kungfu.launcher.controller.startup import CONFIG_SERVER_START_S
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot, Term, TimeToAsk, may_go_on
from ms_kungfu.launcher.state.start_error import StartError
from ms_kungfu.launcher.within import within

_log = logging.getLogger(__name__)
_LAST_LEASE_S = 5.0  # added to a job's wait for the end of the previous job
RENEW_S = 0.2  # time until the launcher retries a call to an unavailable store
END_S = 2.0
# If the write of an entry takes longer, the members' deadlines stop. A write normally takes a few milliseconds.
_LONG_S = 0.3
# Interval at which the real clock is read. If this host is paused, the event loop's timers count at most MOST_GAP_S of
# the pause. So a timer of half of MOST_GAP_S fires at once after a pause.
_LOOK_S = MOST_GAP_S / 2


class EtcdLease:
    """Implements `Leadership` with a lease in etcd. `url`: the URL of the job's store. `own`: this host's name.

    `on_step_down(why)` is called when another host takes over the job. `on_new_lease()` is called when the lease had
    expired and this controller has acquired a new one. `on_store_awaited(yes)` is called with True when a decision
    starts waiting for the store, and with False when no decision waits for the store any more.
    """

    moves = True

    def __init__(
        self, term: Term, machine: Machine, url: str, own: str,
        on_step_down: Callable[[str], None], on_new_lease: Callable[[], None],
        on_store_awaited: Callable[[bool], None] = lambda yes: None,
    ) -> None:  # fmt: skip
        self.term, self.lease, self.has_stepped_down, self.is_gone = term, term.lease, False, False
        self._machine, self._url, self._own = machine, url, own
        self._on_step_down, self._on_new_lease, self._on_store_awaited = on_step_down, on_new_lease, on_store_awaited
        self.store_error: ConfigServerError | None = None  # the error of the last lease call, unless the lease is lost
        # what decisions wait for: the store's answer to a call ("answer"), or an entry that the store hasn't accepted
        # yet ("entry")
        self._awaited: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._under_way: asyncio.Future[None] | None = None  # the last call of a function of the lease
        self._last = term.snapshot  # the newest entry that this controller has tried to write
        self._time = TimeToAsk(self.lease.lease_s)
        self._keeping: asyncio.Future[None] | None = None
        # the newest cluster version that the members may be notified of, and the newest version for which a call waits
        self._on_record = self._to_ask = -1

    @property
    def resumes(self) -> LeaderSnapshot | None:
        """Return the snapshot of the previous controller, whose job this controller continues."""
        return self.term.snapshot

    @property
    def awaits_store(self) -> bool:
        """Return whether a decision waits for the store."""
        return bool(self._awaited)

    @property
    def has_held(self) -> bool:
        """Return whether this controller has had the lease, even if it has stepped down since."""
        return self.lease.since != 0

    # ---- acquiring the lease ----

    async def await_turn(self) -> None:
        """Wait until the previous job with this name is over. Until then, write nothing for this job.

        If the previous job has lost its controller, another of its hosts can continue the job within the duration of
        one lease.
        """
        term, is_logged, empty_since = self.term, False, math.inf
        patience_s = 3 * self.lease.lease_s + _LAST_LEASE_S
        deadline = self._loop.time() + CONFIG_SERVER_START_S
        while True:
            try:
                found = await self._machine.in_thread(term.keys.look)
                now = self._loop.time()
                empty_since = math.inf if found.holder else min(empty_since, now)
                if not found.holder and (now - empty_since >= self.lease.lease_s or not may_go_on(found, self._own)):
                    return
                trouble = self._taken()
                if not is_logged:
                    is_logged, deadline = True, now + patience_s
                    _log.info(
                        "waiting for the last job: url=%s holder=%s limit_s=%.0f",
                        self._url, found.holder or "none", patience_s,
                    )  # fmt: skip
            except StoreUnreachableError as error:
                trouble = error.question
            except ConfigServerError as error:
                raise StartError(str(error)) from None
            if self._loop.time() > deadline:
                raise StartError(trouble)
            await asyncio.sleep(RENEW_S)

    async def acquire(self, snapshot: Callable[[], LeaderSnapshot]) -> None:
        """Acquire the lease before the job begins."""
        self._last = snapshot()
        term, document = self.term, self._last.to_json()
        deadline = self._loop.time() + self.lease.lease_s
        while True:
            try:
                found = await self._machine.in_thread(term.keys.look)
                await self._call(functools.partial(self.lease.take, found, document))
                return
            except StoreUnreachableError as error:
                if self._loop.time() > deadline:
                    raise StartError(error.question) from None
            except LeadershipLostError:
                raise StartError(self._taken()) from None
            except ConfigServerError as error:
                raise StartError(str(error)) from None
            await asyncio.sleep(RENEW_S)

    def _taken(self) -> str:
        return f"{self._url} is used by another {PROGRAM}; give this job another name"

    # ---- keeping the lease ----

    def keep(self, store: Any) -> Callable[[], object]:
        """Renew the lease, and make the cluster store `store` accept writes only while this lease holds.

        Return a function that stops the renewals.
        """
        self.term.guard(store)
        self._time = TimeToAsk(self.lease.lease_s)
        self._time.answered(self._machine.monotonic())
        self._keeping = asyncio.ensure_future(self._keep())
        self._keeping.add_done_callback(raise_bugs)
        return self._keeping.cancel

    async def _keep(self) -> None:
        while not self.has_stepped_down:
            await self._until_it_is_time()
            await self._renew()

    async def _until_it_is_time(self) -> None:
        """Wait for a quarter of the lease's duration.

        The lease expires even while this host is paused. So this function measures real time, and returns at once
        after a pause.
        """
        end = self._machine.monotonic() + self.lease.lease_s / 4
        while (left_s := end - self._machine.monotonic()) > 0 and not self.has_stepped_down:
            await asyncio.sleep(min(left_s, _LOOK_S))

    async def _renew(self) -> bool:
        """Renew the lease. Return False if the store is unavailable or full."""
        asked = self._time
        try:
            await self.act(lambda: self._call(self.lease.renew))
            asked.answered(self._machine.monotonic())
        except ConfigServerError:  # the store is unavailable, or it is full and the lease has expired
            asked.failed(self._machine.monotonic())
            return False
        return True

    async def has_it_again(self) -> bool:
        """Return whether this controller has the lease after the store has rejected a write.

        If the lease expired while all hosts were paused, this controller acquires a new one.
        """
        await self._renew()
        return not self.has_stepped_down

    async def time_to_ask(self) -> float:
        """Return how long the hosts have been able to find this controller, in seconds (`TimeToAsk`)."""
        await self._renew()
        return self._time.seconds

    @property
    def has_stood_still(self) -> bool:
        """Return whether this host was paused a moment ago."""
        return self._time.has_stood_still(self._machine.monotonic())

    # ---- entries ----

    async def act(self, act: Callable[[], Awaitable[object]]) -> None:
        """Run `act` after all earlier actions have ended. Step down if another controller has the lease."""
        lease = self.lease
        try:
            async with self._lock:
                since = lease.since
                if not self.has_stepped_down:
                    await act()
                if lease.since != since and not self.has_stepped_down:
                    self._on_new_lease()
        except LeadershipGoneError as error:
            self.is_gone = True
            self._lose_lease(f"{error}: no host decides for the job any more", str(error))
        except LeadershipLostError as error:
            self._lose_lease(f"{error}: another host decides for the job from now on")

    async def _call(self, function: Callable[[], None], long_s: float | None = None) -> None:
        """Call a function of the lease in a thread. The thread continues even if the awaiting task is cancelled.

        The next call waits until the thread has finished this call. Otherwise, an older entry could be written after a
        newer one. If the call takes longer than `long_s` (default: half the duration of the lease), the members'
        deadlines stop.
        """
        long_s = self.lease.lease_s / 2 if long_s is None else long_s
        long = self._loop.call_later(long_s, self._await_store, "answer", True)
        goes_on = False
        try:
            if self._under_way is not None and not self._under_way.done():
                await asyncio.wait({self._under_way})
            self._under_way = asyncio.ensure_future(self._machine.in_thread(function))
            self._under_way.add_done_callback(lambda call: call.cancelled() or call.exception())
            await asyncio.shield(self._under_way)
            self.store_error = None
        except ConfigServerError as error:
            self.store_error = None if isinstance(error, LeadershipLostError) else error
            raise
        except asyncio.CancelledError:
            goes_on = True  # the thread continues, and decisions may wait for the thread
            raise
        finally:
            long.cancel()
            if not goes_on:
                self._await_store("answer", self.store_error is not None)

    def _await_store(self, what: str, yes: bool) -> None:
        before = bool(self._awaited)
        (self._awaited.add if yes else self._awaited.discard)(what)
        if bool(self._awaited) != before:
            self._on_store_awaited(not before)

    async def write(self, snapshot: Callable[[], LeaderSnapshot]) -> bool:
        """Write an entry, and retry while the store is unavailable. Call this only within `act`.

        Return False if this host gives up the lease during the call. Then it is unknown whether the entry was written,
        so the caller must not act on the entry.
        """
        try:
            return await self._write(snapshot)
        finally:
            self._await_store("entry", False)

    async def _write(self, snapshot: Callable[[], LeaderSnapshot]) -> bool:
        lease, is_logged = self.lease, False
        while not self.has_stepped_down:
            self._last = snapshot()
            try:
                await self._call(functools.partial(lease.write, self._last.to_json()), _LONG_S)
                return True
            except LeadershipLostError:
                raise
            except ConfigServerError as error:  # the store is unavailable, or full
                self._await_store("entry", True)
                if not is_logged:
                    is_logged = True
                    _log.warning(
                        'store unavailable: error="%s". Changes and recoveries wait until the store answers, and no '
                        "deadline of a worker runs",
                        error,
                    )
                await asyncio.sleep(RENEW_S)
                try:  # no other controller has the lease, and a renewal works even if the store is full
                    await self._call(lease.renew)
                except LeadershipLostError:
                    raise
                except ConfigServerError:
                    pass
        return False

    def may_say(self, version: int) -> bool:
        """Return whether the members may be notified of this cluster version.

        A notified member waits at its next step for the commit of the version, and the commit must first be written to
        the snapshot. So no member is notified of another version while the store is unavailable.
        """
        return self._on_record >= version

    async def until_it_may_be_said(self, version: int, is_over: Callable[[], bool]) -> bool:
        """Wait until the members may be notified of this cluster version.

        Return False if another call already waits for this version or a newer one, or if the notification no longer
        matters.
        """
        if version <= self._to_ask:
            return False
        self._to_ask = version
        while not self.has_stepped_down and not is_over() and version == self._to_ask:
            if await self._renew():
                self._on_record = max(self._on_record, version)
                return True
            await asyncio.sleep(RENEW_S)
        return False

    # ---- giving up the lease ----

    def _lose_lease(self, sentence: str, reason: str = "another host controls the job") -> None:
        if not self.has_stepped_down:
            self.has_stepped_down = True
            _log.warning('leadership lost: reason="%s"', sentence)
            self._on_step_down(reason)

    async def step_down(self, registered: Collection[str]) -> None:
        """Give up the lease because this host was paused.

        Hosts that have left this controller don't register with it again. `registered`: the hosts that are still
        registered with it.
        """

        async def give_up() -> None:
            last = self._last
            assert last is not None
            if await self.write(lambda: last.left_by(self._own, registered)):
                self._lose_lease(
                    "this host was paused, and other hosts have left it: another host decides for the job from now on"
                )
                with contextlib.suppress(ConfigServerError):  # if this fails, the lease expires
                    await self._call(self.lease.leave)

        await self.act(give_up)

    async def leave(self) -> None:
        """Give up the lease because this host leaves.

        The next controller then needn't wait until the lease expires. Also stop all later writes, because a write
        without a lease would acquire the lease again.
        """
        self.has_stepped_down = True
        await self.release()

    async def release(self) -> None:
        """Delete the lease, because the job is over and the snapshot records this."""

        async def leave() -> None:
            async with self._lock:
                await self._call(self.lease.leave)

        with contextlib.suppress(asyncio.TimeoutError, ConfigServerError):
            await within(END_S, leave())
