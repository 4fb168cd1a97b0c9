"""A host that joins a running job (``-join URL``): its questions before it registers, and the answers.

The head node sends the job's program and flags, over a separate connection that changes nothing there. Then the host is
like any other: its launcher (`agent`) calls the controller, and says that it joins, and with how many slots.

The controller handles each conflict in one place and without a wait (`RemoteHosts._serve`), by the state at that
moment:
- Of two callers with one name the second is rejected.
- A job that ends meanwhile rejects both, or answers no more.
- A host that failed unnoticed (its machine was switched off and is back before -host-timeout) is "a host of the job
  already" until the timeout.
- A failure at the same time is independent: each write to the store follows from what is known then, and they go there
  in turn.

A host that comes back shares only its name with the former host:
- connections: the controller's view of a host is an object, and what a version has of it is that object
  (`SpreadSegment`);
- processes: a worker is an address and the version it was started for, and the old ones are excluded
  (`ClusterVersions`);
- versions: those that were known when it came back mean the old one, and are never committed.

If its former launcher still runs there, on a machine that stood still, this one can't bind its port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
from dataclasses import replace
from typing import Any, Callable

from ms_kungfu._decoding import ProtocolError
from ms_kungfu._flags import UsageError
from ms_kungfu._run_loop import run
from ms_kungfu._version import VERSION, mindspore_version
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import ClusterStore, StoreUnreachableError, has_leadership, open_leadership, open_store
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher import network
from ms_kungfu.launcher.control import RefusedError, call
from ms_kungfu.launcher.host_flags import check_tls
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import JoinRequest, Options, check_program, known_isa, known_strategy
from ms_kungfu.launcher.registration import OF_THE_JOB
from ms_kungfu.launcher.state.hosts import Host, HostError, Hosts, identify, of_interface, parse_hosts
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot, how_it_has_ended, may_go_on
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

_ANSWER_S = 10.0  # the job runs: no wait is needed
# If the controller moves: some leases, until there is another one; each call, and between two looks at the lease.
_LEADER_S = 30.0
_CALL_S = 2.0
_LOOK_S = 1.0
# The job's flags that differ by host, or that a running job has settled.
_NOT_FROM_THE_CONTROLLER = {"config_server", "watch", "timeout_s", "init_version"}
_FROM_THE_CONTROLLER = [name for name in OF_THE_JOB if name not in _NOT_FROM_THE_CONTROLLER]
# Flags that aren't numbers: how to encode and decode them.
_SPELT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "ports": (lambda ports: f"{ports.start}-{ports.stop}", lambda text: range(*map(int, text.split("-")))),
    "recover": (lambda recover: recover.value, Recover),
    "strategy": (str, known_strategy),
    "cpu_isa": (str, known_isa),
}


# ---- at the controller ----


def terms_of(options: Options, hosts: Hosts, left_s: float | None = None) -> m.Terms:
    """Return what a host needs to know to take part in the job, and to continue it as its controller.

    `hosts`: those that are there; `left_s`: of -timeout.
    """
    flags = {
        name: _SPELT[name][0](getattr(options, name)) if name in _SPELT else getattr(options, name)
        for name in _FROM_THE_CONTROLLER
    }
    placement: Any = hosts.placement
    return m.Terms(
        list(map(os.fsencode, options.command)), [(host.name, host.slots) for host in hosts.staying], hosts.head.name,
        hosts.most, placement, None if hosts.ports is None else (hosts.ports.start, hosts.ports.stop), flags, left_s,
    )  # fmt: skip


def joining_host(name: str, slots: object, least: int = 1) -> Host:
    """Return the host. ProtocolError if there can be no such host, or it has fewer slots than `least`."""
    with contextlib.suppress(argparse.ArgumentTypeError):
        if type(slots) is int and slots >= least:
            host, *more = parse_hosts(f"{name}:{slots}")
            if host.name == name and not more:
                return host
    raise ProtocolError(f"no host joins as {name!r} with {slots!r} slots")


# ---- at the host that joins ----


def ask(request: JoinRequest) -> Options:
    """Return how this host takes part in the job. UsageError and RefusedError say why it can't."""
    return run(_ask(request))


async def _ask(request: JoinRequest) -> Options:
    url = request.url
    try:
        store = open_store(url)
        cluster = store.get()
    except ValueError as error:
        raise UsageError(f"-join: {error}") from None
    except ConfigServerError as error:
        raise RefusedError(f"{error}; is the job running, and that the address of its config server?") from None
    if cluster is None:
        raise RefusedError(f"{url} holds no cluster; is the job running?")
    if cluster.slots is None or not cluster.runners:
        raise RefusedError(
            f"the job of {url} was started on one host, and listens to no other; start it with several (-H), or "
            "with -joinable, to have more join"
        )
    head, own, terms = await _terms(request, store, cluster)
    try:
        options = options_from(terms, request, own)
    except (LookupError, TypeError, ValueError, OverflowError, ProtocolError) as error:
        raise RefusedError(f"the head node of the job, {head}, says wrongly what the job is: {error!r}") from None
    try:
        check_program(options.command)
    except UsageError as error:
        raise RefusedError(f"the job's program can't be run here: {error}") from None
    return options


class _SilentError(RefusedError):
    """No launcher answers there."""


async def _terms(request: JoinRequest, store: ClusterStore, cluster: Cluster) -> tuple[PeerID, Host, m.Terms]:
    """Ask the controller. Return its host, this host's name, and the job's terms.

    If the controller moves (`lease`) it may just have failed, and the next one takes the lease once it expires. So this
    host reads the lease again until its holder answers. Without a holder the rule in `_head_of` applies. A job that
    doesn't move its controller leaves no snapshot, so one that is there is an earlier job's.
    """
    loop = asyncio.get_running_loop()
    deadline, before = loop.time() + _LEADER_S, ""
    while True:
        holder, vacant = _leader_of(store.url, cluster) if has_leadership(store.url) else ("", "")
        moves = bool(holder or vacant)
        try:
            head = PeerID(holder, cluster.runners[0].port) if holder else _head_of(store, cluster)
            own, answer = await _ask_controller(request, cluster, head, _CALL_S if moves else _ANSWER_S)
            if isinstance(answer, m.Terms):
                return head, own, answer
            raise RefusedError(answer.reason)
        except RefusedError as error:
            # The new leader may not know it yet, and answers that it doesn't have the job.
            is_certain = not isinstance(error, _SilentError) and not vacant and before in ("", holder)
            if not moves or is_certain:
                raise
            if loop.time() >= deadline:
                raise RefusedError(vacant or str(error)) from None
        before = holder or "-"
        await asyncio.sleep(_LOOK_S)


def _leader_of(url: str, cluster: Cluster) -> tuple[str, str]:
    """Return the holder of the lease, "" without one, and then, if another host may take it, a sentence about that.

    RefusedError if the job has ended.
    """
    try:
        found = open_leadership(url).look()
        snapshot = None if found.snapshot is None else LeaderSnapshot.from_json(found.snapshot)
    except StoreUnreachableError as error:  # its leader may have died with the controller
        return "", f"the host that has the job of {url} is unknown: {error}"
    except (ConfigServerError, ProtocolError) as error:
        raise RefusedError(f"the host that has the job of {url} is unknown: {error}") from None
    if snapshot is not None and snapshot.end is not None and snapshot.has(cluster):
        raise RefusedError(f"the job of {url} has ended ({how_it_has_ended(snapshot.end)})")
    if found.holder or snapshot is None or not may_go_on(found, snapshot.head):
        return found.holder, ""
    return "", (
        f"no host has the job of {url} at the moment: {snapshot.head}, which had it, has failed, and no other host has "
        f"taken its place within {_LEADER_S:g} s"
    )


async def _ask_controller(
    request: JoinRequest, cluster: Cluster, head: PeerID, limit_s: float
) -> tuple[Host, m.Terms | m.RegistrationRejected]:
    machine, own = Machine(), _own_host(request, head)
    others = [Host(runner.host) for runner in cluster.runners if runner.host != own.name]
    try:
        identify([*others, own], own.name, None)
    except HostError as error:
        raise UsageError(str(error)) from None
    check_tls(own.address)
    secret = bytes.fromhex(request.secret or "")
    try:
        channel = await call(machine, own.address, Host(head.host).address, head.port, secret, limit_s)
        try:
            channel.send(m.Ask(own.name, own.slots or 0, VERSION, mindspore_version()))
            return own, await within(_ANSWER_S, channel.receive(m.TERMS))
        finally:
            channel.close()
    except (OSError, asyncio.TimeoutError) as error:
        raise _SilentError(
            f"the head node of the job, {head}, doesn't answer: {error or 'it takes too long'}"
        ) from None
    except ValueError as error:  # no library for TLS
        raise RefusedError(str(error)) from None
    except ProtocolError as error:
        raise RefusedError(f"the head node of the job, {head}, says what isn't understood: {error}") from None


def _head_of(store: ClusterStore, cluster: Cluster) -> PeerID:
    """Return the head node by its hosts' rule (`host_flags`): the one with the config server, or the first one."""
    wanted = network.addresses_of_server(store.servers)
    for runner in cluster.runners:
        address = Host(runner.host).address
        if wanted & {address, *network.addresses_of(address)}:
            return runner
    return cluster.runners[0]


def _own_host(request: JoinRequest, head: PeerID) -> Host:
    """Return the address that the controller sees, by default."""
    if request.own is not None:
        return request.own
    if request.interface is not None:
        try:
            address = of_interface(request.interface)[0]
        except HostError as error:
            raise UsageError(str(error)) from None
    else:
        address = _address_towards(Host(head.host).address, head.port)
    return parse_hosts(f"[{address}]" if ":" in address else address)[0]


def _address_towards(host: str, port: int) -> str:
    trouble: object = "it has no address"
    with contextlib.suppress(socket.gaierror):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)  # which sends nothing
                    return str(probe.getsockname()[0])
            except OSError as error:
                trouble = error
    raise _SilentError(f"{host}, the head node of the job, can't be reached: {trouble}")


def options_from(terms: m.Terms, request: JoinRequest, own: Host) -> Options:
    """Return the options. ValueError, TypeError, KeyError or ProtocolError if `terms` aren't valid."""
    listed = [joining_host(name, slots, least=0) for name, slots in terms.hosts if name != own.name]
    flags: dict[str, Any] = {name: terms.flags[name] for name in _FROM_THE_CONTROLLER}
    if any(isinstance(value, str) for name, value in flags.items() if name not in _SPELT):
        raise ValueError("flags are numbers")
    for name, (_, understood) in _SPELT.items():
        try:
            flags[name] = understood(flags[name])
        except (AttributeError, argparse.ArgumentTypeError):
            raise ValueError(f"{name} {flags[name]!r}") from None
    ports = terms.ports and range(*terms.ports)
    hosts = Hosts((*listed, own), own.name, terms.head, terms.most, terms.placement, ports)
    if hosts.head_name not in hosts.names or hosts.is_head:
        raise ValueError("the controller is another one")
    options = Options(
        tuple(map(os.fsdecode, terms.command)), watch=True, config_server=request.url, timeout_s=terms.left_s,
        hosts=hosts, joins=True, **flags,
    )  # fmt: skip
    return replace(options, **request.own_flags, secret=request.secret)
