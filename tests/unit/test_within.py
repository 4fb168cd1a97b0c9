"""A limit on time, beside cancellation: a cancelled task ends by that, and no exception is left unheard."""

import asyncio
import socket
import struct

import pytest

from ms_kungfu.launcher import control
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.within import within
from tests.garbage import collected


async def value_of(work, *, later=0.0):
    await asyncio.sleep(later)
    return work() if callable(work) else work


def test_within_returns_the_value_and_raises_the_exception_of_the_work():
    assert asyncio.run(within(5, value_of(3))) == 3
    assert asyncio.run(within(None, value_of(4))) == 4
    with pytest.raises(ZeroDivisionError):
        asyncio.run(within(5, value_of(lambda: 1 // 0)))


def test_work_that_exceeds_the_time_has_ended_when_the_timeout_raises():
    ended = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(within(0.01, work()))
    assert ended == [True]


@pytest.mark.parametrize("passes", range(8))
def test_a_call_that_is_cancelled_as_the_other_end_resets_it(passes):
    """`passes` of the loop later, in which the news goes up through three limits."""

    async def run():
        loop, told = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: told.append(context["message"]))
        with socket.socket() as listener, collected():
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            port = listener.getsockname()[1]
            call = asyncio.ensure_future(control.call(Machine(), "127.0.0.1", "127.0.0.1", port, b"x" * 16, 10))
            accepted, _ = await loop.sock_accept(listener)
            await asyncio.sleep(0.05)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()
            for _ in range(passes):
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            del call
        await asyncio.sleep(0.01)
        return told

    assert asyncio.run(run()) == []


def test_connection_that_no_caller_receives_is_closed():
    class Connection:
        closed = False

        def close(self):
            self.closed = True

    made = Connection()

    async def run():
        waiting = asyncio.ensure_future(within(5, value_of(made, later=0.02)))
        await asyncio.sleep(0)
        inner = next(task for task in asyncio.all_tasks() if task not in (waiting, asyncio.current_task()))
        inner.add_done_callback(lambda _: waiting.cancel())  # in the same pass of the loop
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
    assert made.closed
