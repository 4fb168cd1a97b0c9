"""A controller's hold on the lease, on the loop of its job: how it gets there, keeps it, and what it may say by it.

The controller alone writes the record, one entry after the other (the lock): what one of them says was true when the
one before it was there. An entry that returns is on record, and only then anybody hears of it. Where a write finds that
somebody else has taken the lease, this controller has stepped down: nothing that it has not said yet will be said, and
this tenure never begins again, whatever becomes of the other. Renewals stand in the same queue, since the lease takes
one call at a time.

What members wait for may wait for an entry, and so for the store: while an entry takes long, while a renewal has failed
or takes half a lease, and until an entry that has failed is there, no deadline of theirs runs (`on_store_awaited`).
A renewal that is merely slow holds nothing: there is always one, and the members seldom wait for what it tells.

If the controller dies between two lines here, the lease ends by itself; what is on record then, the next one carries
out, and what is not nobody has heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Awaitable
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
_LAST_LEASE_S = 5.0  # for the leases of a job that is over, beyond their length
RENEW_S = 0.2  # before a store that is away is asked again
END_S = 2.0
_LONG_S = 0.3  # for one entry, which takes some milliseconds
_LOOK_S = MOST_GAP_S / 2  # at the real clock, by timers of the run-time clock: each is due at once behind a pause


class EtcdLease:
    """`Leadership` by a lease in etcd.

    `on_step_down(why)`: another host decides from now on. `on_new_lease`: the lease was over, and there is another one.
    `on_store_awaited(yes)`: a decision waits for the store from now on, or doesn't any more. `url`: of the job's store;
    `own`: this host's name.
    """

    moves = True

    def __init__(
        self, term: Term, machine: Machine, url: str, own: str,
        on_step_down: Callable[[str], None], on_new_lease: Callable[[], None],
        on_store_awaited: Callable[[bool], None] = lambda yes: None,
    ) -> None:  # fmt: skip
        self.term, self.lease, self.has_stepped_down, self.is_gone = term, term.lease, False, False
        self._machine, self._url, self._own = machine, url, own
        self._on_step_down, self._on_new_lease = on_step_down, on_new_lease
        self._on_store_awaited = on_store_awaited
        self._awaited: set[str] = set()  # of the store: the answer to a call, an entry that it hasn't taken yet
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._under_way: asyncio.Future[None] | None = None  # the last call of the lease
        self._time = TimeToAsk(self.lease.lease_s)
        self._keeping: asyncio.Future[None] | None = None
        self._on_record = self._to_ask = -1  # the newest version that the members may hear of, or will

    @property
    def resumes(self) -> LeaderSnapshot | None:
        """What the controller before has left, with whose job this one goes on."""
        return self.term.snapshot

    @property
    def awaits_store(self) -> bool:
        """What is to be decided waits for the store."""
        return bool(self._awaited)

    @property
    def has_held(self) -> bool:
        """It has taken the lease, even if it has stepped down by now."""
        return self.lease.since != 0

    # ---- sitting down ----

    async def await_turn(self) -> None:
        """Until the last job of this name is over: nothing of this one is written before. Where it has lost its
        controller its other hosts go on with it, and have the time of a lease for that."""
        term, told, empty_since = self.term, False, math.inf
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
                if not told:
                    told, deadline = True, now + patience_s
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
        """Before the job begins."""
        term, document = self.term, snapshot().to_json()
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
        return f"{self._url} is the job of another {PROGRAM}; give this one another name"

    # ---- keeping it ----

    def keep(self, store: Any) -> Callable[[], object]:
        """From now on; `store`, of the cluster, is written to by who has the lease. Returns what ends the keeping."""
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
        """For a quarter of the lease. That runs on in the store while this host stands still, so this is a matter of
        the real clock: behind a pause the lease is renewed at once."""
        end = self._machine.monotonic() + self.lease.lease_s / 4
        while (left_s := end - self._machine.monotonic()) > 0 and not self.has_stepped_down:
            await asyncio.sleep(min(left_s, _LOOK_S))

    async def _renew(self) -> bool:
        """Whether the store has answered."""
        asked = self._time
        try:
            await self.act(lambda: self._call(self.lease.renew))
            asked.answered(self._machine.monotonic())
        except ConfigServerError:  # away; or full, and the lease is over: nobody has the lease
            asked.failed(self._machine.monotonic())
            return False
        return True

    async def has_it_again(self) -> bool:
        """The store has refused a write: either the lease was over, while all stood still, and there is another one, or
        somebody else decides."""
        await self._renew()
        return not self.has_stepped_down

    async def time_to_ask(self) -> float:
        """For how long the hosts could have found out who sits here (`TimeToAsk`)."""
        await self._renew()
        return self._time.seconds

    @property
    def has_stood_still(self) -> bool:
        """This host has, a moment ago."""
        return self._time.has_stood_still(self._machine.monotonic())

    # ---- entries ----

    async def act(self, act: Callable[[], Awaitable[object]]) -> None:
        """One after the other. Where somebody else has the lease the job is his."""
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
        """Of the lease, in a thread, which goes on where who awaits it is cancelled: the next call waits for its end,
        or an older entry might come behind a newer one. Deadlines are held after `long_s`, half a lease by default."""
        long_s = self.lease.lease_s / 2 if long_s is None else long_s
        long = self._loop.call_later(long_s, self._await_store, "answer", True)
        answered, goes_on = True, False
        try:
            if self._under_way is not None and not self._under_way.done():
                await asyncio.wait({self._under_way})
            self._under_way = asyncio.ensure_future(self._machine.in_thread(function))
            self._under_way.add_done_callback(lambda call: call.cancelled() or call.exception())
            await asyncio.shield(self._under_way)
        except ConfigServerError as error:
            answered = isinstance(error, LeadershipLostError)
            raise
        except asyncio.CancelledError:
            goes_on = True  # and what it holds, until the end of the next call
            raise
        finally:
            long.cancel()
            if not goes_on:
                self._await_store("answer", not answered)

    def _await_store(self, what: str, yes: bool) -> None:
        before = bool(self._awaited)
        (self._awaited.add if yes else self._awaited.discard)(what)
        if bool(self._awaited) != before:
            self._on_store_awaited(not before)

    async def write(self, snapshot: Callable[[], LeaderSnapshot]) -> bool:
        """Write it, however long the store is away. Within `act`; LeadershipLostError as there. Return False if this
        host leaves the lease meanwhile: then it isn't there, as far as this controller can tell, and may not be acted
        on."""
        try:
            return await self._write(snapshot)
        finally:
            self._await_store("entry", False)

    async def _write(self, snapshot: Callable[[], LeaderSnapshot]) -> bool:
        lease, told = self.lease, False
        while not self.has_stepped_down:
            document = snapshot().to_json()
            try:
                await self._call(functools.partial(lease.write, document), _LONG_S)
                return True
            except LeadershipLostError:
                raise
            except ConfigServerError as error:  # away, or full
                self._await_store("entry", True)
                if not told:
                    told = True
                    _log.warning(
                        'store unavailable: error="%s". Changes and recoveries wait until the store answers, and no '
                        "deadline of a worker runs",
                        error,
                    )
                await asyncio.sleep(RENEW_S)
                try:  # nobody else does meanwhile, and a lease takes no room
                    await self._call(lease.renew)
                except LeadershipLostError:
                    raise
                except ConfigServerError:
                    pass
        return False

    def may_say(self, version: int) -> bool:
        """Who has heard of a version waits for it at the next step, and that it is committed has to be on
        record: while the store is away nobody hears of another one."""
        return self._on_record >= version

    async def until_it_may_be_said(self, version: int, is_over: Callable[[], bool]) -> bool:
        """False where that is asked already, for this version or a newer one, or doesn't matter any more."""
        if version <= self._to_ask:
            return False
        self._to_ask = version
        while not self.has_stepped_down and not is_over() and version == self._to_ask:
            if await self._renew():
                self._on_record = max(self._on_record, version)
                return True
            await asyncio.sleep(RENEW_S)
        return False

    # ---- its end ----

    def _lose_lease(self, sentence: str, reason: str = "another host has the job") -> None:
        if not self.has_stepped_down:
            self.has_stepped_down = True
            _log.warning('leadership lost: reason="%s"', sentence)
            self._on_step_down(reason)

    async def step_down(self) -> None:
        """This controller stood still, and hosts have left it, which come back to another one only. Who takes the lease
        next, this host perhaps, hears who is there."""
        async with self._lock:
            self._lose_lease(
                "this host stood still, and others have left it: another one decides for the job from now on"
            )
            with contextlib.suppress(ConfigServerError):  # else the lease ends by itself
                await self._call(self.lease.leave)

    async def leave(self) -> None:
        """Its host goes. The next controller needn't wait for the end of the lease, and no write begins here any more:
        a lease that is missed would be taken anew."""
        self.has_stepped_down = True
        await self.release()

    async def release(self) -> None:
        """The job is over, and that is on record."""

        async def leave() -> None:
            async with self._lock:
                await self._call(self.lease.leave)

        with contextlib.suppress(asyncio.TimeoutError, ConfigServerError):
            await within(END_S, leave())
