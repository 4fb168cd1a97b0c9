"""What a job asks of the machine that it runs on: all of it, so that a job can run on another one that is simulated.

The event loop is asyncio's running one, and with it the clock and the timers of everything that the loop runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import resource
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import ClusterStore, open_store
from ms_kungfu.config_server.secret_file import SecretFile, secret_from, write_secret
from ms_kungfu.launcher import affinity, devices
from ms_kungfu.launcher.broker import Broker
from ms_kungfu.launcher.broker_server import BrokerServer
from ms_kungfu.launcher.hangs import is_stopped

if TYPE_CHECKING:
    from ms_kungfu.config_server.server import ConfigServer
    from ms_kungfu.config_server.store import ConfigStore

T = TypeVar("T")


class Machine:
    """The real one."""

    environ: Mapping[str, str] = os.environ
    standby_delay_s = 2.0  # whoever has just joined is busy, and a new process would be in its way

    # ---- threads ----

    def start_thread(self, name: str, function: Callable[[], None]) -> None:
        threading.Thread(target=function, name=name, daemon=True).start()

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Like asyncio.to_thread, but nobody waits for the thread when the job is interrupted."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.start_thread("kungfu-request", run)
        return await asyncio.wrap_future(future)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def monotonic(self) -> float:
        return time.monotonic()

    # ---- processes ----

    def allowed_cores(self) -> list[int]:
        return affinity.allowed_cores()

    def pin(self, pid: int, cores: Iterable[int]) -> None:
        affinity.pin(pid, cores)

    def find_devices(self, host: str, *, single: bool, allow_nvlink: bool) -> devices.Devices:
        return devices.find(self.environ, os.listdir("/dev"), host=host, single=single, allow_nvlink=allow_nvlink)

    def is_stopped(self, pid: int) -> bool:
        return is_stopped(pid)

    def spare_descriptors(self) -> float:
        """How many more this process may have."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            return float("inf") if limit == resource.RLIM_INFINITY else limit - len(os.listdir("/proc/self/fd"))
        except FileNotFoundError:  # no /proc
            return float("inf")
        except OSError:  # there is none to look with
            return 0

    # ---- the broker ----

    def make_broker(self, cores: int, **options: Any) -> Broker:
        return Broker(cores, **options)

    def serve_broker(self, broker: Broker, secret: bytes) -> BrokerServer:
        return BrokerServer(broker, secret)

    # ---- the cluster store ----

    def open_store(self, url: str, secret: str, writer: str) -> ClusterStore:
        return open_store(url, secret, writer=writer)

    def make_config_server(
        self,
        store: ConfigStore,
        secret: str,
        *,
        host: str,
        port: int,
        path: str,
        on_change: Callable[[Cluster | None], None],
    ) -> ConfigServer:
        # aiohttp takes 0.2 s to import, which jobs without a config server need not pay for.
        from ms_kungfu.config_server.server import ConfigServer

        return ConfigServer(store, secret, host=host, port=port, path=path, on_change=on_change)

    def secret_of(self, url: str) -> str | None:
        """The secret that a config server of this user has left."""
        return secret_from({}, url)

    def leave_secret(self, url: str, secret: str) -> SecretFile:
        return write_secret(url, secret)
