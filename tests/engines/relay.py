"""A relay between a client and a server, which ends connections when a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Relay:
    """Listens on 127.0.0.1:`port`, and passes on to the server's `to` there."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        begun = threading.Event()
        self._loop.call_soon(begun.set)
        self._thread.start()
        begun.wait()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self.port = self._server.sockets[0].getsockname()[1]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        self._open |= {writer, there[1]}
        await asyncio.gather(self._pass_on(reader, there[1]), self._pass_on(there[0], writer))
        self._open -= {writer, there[1]}

    @staticmethod
    async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        """Ends all that goes through it; what was asked may have been done, and no client hears of it."""

        def end() -> None:
            for writer in self._open:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(end)

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.call_later, 0.05, self._loop.stop)
        self._thread.join()
