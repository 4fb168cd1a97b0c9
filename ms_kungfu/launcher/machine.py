"""Provide everything that a job needs from its machine, so that tests can use a simulated machine instead.

The event loop isn't part of this interface: code uses asyncio's running loop, with its clock and its timers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from ms_kungfu import env
from ms_kungfu._processes import ask_for_stack, is_above
from ms_kungfu._tls import from_environment
from ms_kungfu.cluster_store import open_leadership, open_store
from ms_kungfu.config_server.secret_file import own_directories, read_secret, write_secret
from ms_kungfu.launcher import affinity, cpu_isa, devices, memory, signals
from ms_kungfu.launcher.agent.relay import BrokerServer, Relay
from ms_kungfu.launcher.core_claims import CoreClaims
from ms_kungfu.launcher.event_file import EventFile
from ms_kungfu.launcher.pacing import begin_near
from ms_kungfu.launcher.quota import cpu_quota
from ms_kungfu.launcher.state.hangs import is_starved, is_stopped, waits_for_a_core
from ms_kungfu.launcher.status_socket import StatusServer
from ms_kungfu.launcher.wire.messages import CpuIsa

if TYPE_CHECKING:
    from ms_kungfu._core import TlsContext
    from ms_kungfu.cluster_store.store import ConfigStore
    from ms_kungfu.config_server.server import ConfigServer
    from ms_kungfu.launcher.dashboard.server import DashboardServer, Job

T = TypeVar("T")


class Machine:
    """The real machine."""

    environ: Mapping[str, str] = os.environ
    standby_delay_s = 2.0  # the start of another process would slow down workers that have just joined

    # ---- threads ----

    def start_thread(self, name: str, function: Callable[[], None]) -> None:
        threading.Thread(target=function, name=name, daemon=True).start()

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call `function` in a thread, like `asyncio.to_thread`, but let the process exit before the call returns."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.start_thread("kungfu-request", run)
        return await asyncio.wrap_future(future)

    def open_event_file(self, path: Path, fresh: bool) -> EventFile:
        return EventFile(path, fresh, self.start_thread)

    sleep = staticmethod(time.sleep)
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)

    # ---- processes ----

    allowed_cores = staticmethod(affinity.allowed_cores)
    pin = staticmethod(affinity.pin)
    is_stopped = staticmethod(is_stopped)
    is_starved = staticmethod(is_starved)
    ask_for_stack = staticmethod(ask_for_stack)
    waits_for_a_core = staticmethod(waits_for_a_core)
    free_bytes = staticmethod(memory.free_bytes)
    taken_bytes = staticmethod(memory.taken_bytes)
    resident_bytes = staticmethod(memory.resident_bytes)

    def find_devices(self, host: str, *, single: bool, allow_nvlink: bool) -> devices.Devices:
        return devices.find(self.environ, os.listdir("/dev"), host=host, single=single, allow_nvlink=allow_nvlink)

    def claim_cores(self, pins: bool) -> CoreClaims:
        """Return an object that claims cores on this host for a job.

        `pins`: whether the job pins its workers. If so, the object prefers cores that no other job uses.
        """
        return CoreClaims(self.allowed_cores, cpu_quota, own_directories() if pins else ())

    async def cpu_isa(self, wanted: str) -> CpuIsa | None:
        """Return the vector instructions that the host's workers should use (`cpu_isa.of_host`)."""
        return await self.in_thread(lambda: cpu_isa.of_host(wanted, self.environ))

    def spare_descriptors(self) -> float:
        """Return how many more file descriptors this process can open."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            return float("inf") if limit == resource.RLIM_INFINITY else limit - len(os.listdir("/proc/self/fd"))
        except FileNotFoundError:  # no /proc
            return float("inf")
        except OSError:  # no descriptor is free to read the folder
            return 0

    catch_signal = staticmethod(signals.outlive)

    def tell_of_the_beginning(self) -> None:
        """If kungfu-distribute started this launcher, notify kungfu-distribute that the job has begun."""
        with contextlib.suppress(ValueError, OSError):
            shell = env.DISTRIBUTE_SHELL.get(self.environ)
            if shell is not None and is_above(shell):
                os.kill(shell, signal.SIGUSR1)

    # ---- other hosts ----

    @functools.cached_property
    def tls(self) -> TlsContext | None:
        """Return the TLS settings for all connections with other hosts, or None if the connections aren't encrypted.

        Raises ValueError, whose message gives the reason, if TLS is requested but not possible.
        """
        wanted = from_environment(self.environ)
        if wanted is None:
            return None
        from ms_kungfu import _core

        try:
            return _core.TlsContext(wanted.certificate, wanted.key, wanted.ca)
        except ImportError as error:
            raise ValueError(f"{env.TLS_CERT.name} turns on TLS, but no TLS library was found: {error}") from None

    def make_socket(self, family: int) -> socket.socket:
        """Return a TCP socket for a connection with another host."""
        made = socket.socket(family, socket.SOCK_STREAM)
        begin_near(made)
        return made

    # ---- the broker, the cluster store ----

    def runtime(self) -> Any:
        """Return the module that implements shared memory. It is loaded here, because some launchers don't need it."""
        from ms_kungfu import _core

        return _core

    def make_transport(self, local_fd: int, board_fd: int, **options: Any) -> Any:
        """Return the transport that exchanges data with the other hosts (`transports.Transport`)."""
        return self.runtime().InterHostTransport(local_fd, board_fd, **options)

    make_relay = staticmethod(Relay)
    serve_broker = staticmethod(BrokerServer)
    serve_status = staticmethod(StatusServer)
    open_store = staticmethod(open_store)
    open_leadership = staticmethod(open_leadership)
    secret_of = staticmethod(read_secret)
    leave_secret = staticmethod(write_secret)

    def make_config_server(self, store: ConfigStore, secret: str, **options: Any) -> ConfigServer:
        # Importing aiohttp takes 0.2 s, and jobs without a config server don't need it.
        from ms_kungfu.config_server.server import ConfigServer

        return ConfigServer(store, secret, **options)

    host_name = staticmethod(socket.gethostname)

    def make_dashboard(self, job: Job, **options: Any) -> DashboardServer:
        from ms_kungfu.launcher.dashboard.server import DashboardServer

        return DashboardServer(job, **options)
