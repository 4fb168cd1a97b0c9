"""Send the job's settings from the controller to a host that joins the running job (``-join URL``).

The head node sends the job's program and flags over a separate connection, which changes nothing on the head node. Then
the joining host behaves like any other host: its launcher (`agent`) calls the controller. The launcher reports that the
host joins, and how many slots the host has.

The controller resolves each conflict in one place (`RemoteHosts._take_in`), at once and according to the job's state at
that moment:

- If two callers have the same name, the second one is rejected.
- If the job ends in the meantime, the controller rejects the callers, or no longer answers.
- The failure of a host may be unnoticed when the host wants to join again, for example because its machine has
  restarted within -host-timeout. Until -host-timeout is over, the host is rejected as "a host of the job already".
- A failure at the same time causes no conflict. Each write to the store is computed from the state that is known when
  the write is sent, and only one write is sent at a time.

A host that comes back shares only its name with the failed host:

- Connections: the controller has an object for each host. A cluster version refers to that object (`SpreadSegment`).
- Processes: a worker is identified by its address and the version for which it was started. The old workers are
  excluded (`ClusterVersions`).
- Cluster versions: versions that were known when the host came back refer to the failed host, and are never committed.

If the former launcher is still running on the host, for example because the machine was suspended, the new launcher
can't bind its port.
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
from ms_kungfu.launcher.options import JoinRequest, Options, known_isa, known_strategy
from ms_kungfu.launcher.program_file import check_program
from ms_kungfu.launcher.registration import OF_THE_JOB
from ms_kungfu.launcher.state.hosts import Host, HostError, Hosts, identify, of_interface, parse_hosts
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot, how_it_has_ended, may_go_on
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

_ANSWER_S = 10.0  # time limit for an answer; a running job answers at once
# The next three limits apply if the controller can move to another host.
_LEADER_S = 30.0  # time limit for another leader to take over
_CALL_S = 2.0  # time limit for each call
_LOOK_S = 1.0  # time between two reads of the lease
# The flags that may differ between hosts, or that no longer matter when a job is running.
_NOT_FROM_THE_CONTROLLER = {"config_server", "watch", "timeout_s", "init_version"}
_FROM_THE_CONTROLLER = [name for name in OF_THE_JOB if name not in _NOT_FROM_THE_CONTROLLER]
# Functions that encode and decode the flags that aren't numbers.
_SPELT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "ports": (lambda ports: f"{ports.start}-{ports.stop}", lambda text: range(*map(int, text.split("-")))),
    "recover": (lambda recover: recover.value, Recover),
    "strategy": (str, known_strategy),
    "cpu_isa": (str, known_isa),
    "dashboard": (lambda address: address, lambda text: None if text is None else network.known_address(text)),
}


# ---- at the controller ----


def terms_of(options: Options, hosts: Hosts, left_s: float | None = None) -> m.Terms:
    """Return what a host has to know to take part in the job, and to take over as the job's controller.

    `hosts`: the hosts that currently take part in the job. `left_s`: the number of seconds until the job's -timeout.
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
    """Return the joining host. Raises ProtocolError if `name` is invalid, or if `slots` is less than `least`."""
    with contextlib.suppress(argparse.ArgumentTypeError):
        if type(slots) is int and slots >= least:
            host, *more = parse_hosts(f"{name}:{slots}")
            if host.name == name and not more:
                return host
    raise ProtocolError(f"a host can't join as {name!r} with {slots!r} slots")


# ---- at the host that joins ----


def ask(request: JoinRequest) -> Options:
    """Return the options with which this host takes part in the job.

    Raises UsageError or RefusedError if the host can't take part.
    """
    return run(_ask(request))


async def _ask(request: JoinRequest) -> Options:
    url = request.url
    try:
        store = open_store(url)
        cluster = store.get()
    except ValueError as error:
        raise UsageError(f"-join: {error}") from None
    except ConfigServerError as error:
        raise RefusedError(f"{error}; is the job running, and is this the URL of its config server?") from None
    if cluster is None:
        raise RefusedError(f"{url} holds no cluster; is the job running?")
    if cluster.slots is None or not cluster.runners:
        raise RefusedError(
            f"the job that uses {url} was started on one host and accepts no other hosts; start it with several hosts "
            "(-H) or with -joinable, so that hosts can join"
        )
    head, own, terms = await _terms(request, store, cluster)
    try:
        options = options_from(terms, request, own)
    except (LookupError, TypeError, ValueError, OverflowError, ProtocolError) as error:
        raise RefusedError(
            f"the head node of the job, {head}, sent an invalid description of the job: {error!r}"
        ) from None
    try:
        check_program(options.command)
    except UsageError as error:
        raise RefusedError(f"the job's program can't be run here: {error}") from None
    return options


class _NoLeaderError(RefusedError):
    """The controller's launcher doesn't answer, or its host is leaving the job."""


async def _terms(request: JoinRequest, store: ClusterStore, cluster: Cluster) -> tuple[PeerID, Host, m.Terms]:
    """Ask the controller for the job's settings. Return the controller's host, this host, and the settings.

    If the job's controller can move to another host, the present controller may just have failed. Then the next
    controller acquires the lease when the lease expires. So this host reads the lease repeatedly until the lease's
    holder answers and isn't about to leave the job. If the lease has no holder, the rule in `_head_of` applies. A job
    whose controller can't move writes no snapshot, so an existing snapshot belongs to an earlier job.
    """
    loop = asyncio.get_running_loop()
    deadline, before = loop.time() + _LEADER_S, ""
    while True:
        holder, vacant = _leader_of(store.url, cluster) if has_leadership(store.url) else ("", "")
        moves = bool(holder or vacant)
        try:
            head = PeerID(holder, cluster.runners[0].port) if holder else _head_of(store, cluster)
            own, answer = await _ask_controller(request, cluster, head, _CALL_S if moves else _ANSWER_S)
            if isinstance(answer, m.RegistrationRejected):
                raise RefusedError(answer.reason)
            if answer.head in dict(answer.hosts):
                return head, own, answer
            # The head node is leaving, so it isn't in the list of active hosts any more.
            holder = ""
            raise _NoLeaderError(
                f"the head node of the job, {head}, is leaving the job, and no other host has taken over within "
                f"{_LEADER_S:g} s; join again when it has left"
            )
        except RefusedError as error:
            # A new leader might not know yet that it has the lease, and then answers that it doesn't control the job.
            # So try again.
            is_certain = not isinstance(error, _NoLeaderError) and not vacant and before in ("", holder)
            if not moves or is_certain:
                raise
            if loop.time() >= deadline:
                raise RefusedError(vacant or str(error)) from None
        before = holder or "-"
        await asyncio.sleep(_LOOK_S)


def _leader_of(url: str, cluster: Cluster) -> tuple[str, str]:
    """Return the host that holds the lease, and a message if another host may still acquire the lease.

    The host is "" if no host holds the lease. Raises RefusedError if the job has ended.
    """
    try:
        found = open_leadership(url).look()
        snapshot = None if found.snapshot is None else LeaderSnapshot.from_json(found.snapshot)
    except StoreUnreachableError as error:  # the etcd cluster's leader may have failed together with the controller
        return "", f"the head node of the job that uses {url} is unknown: {error}"
    except (ConfigServerError, ProtocolError) as error:
        raise RefusedError(f"the head node of the job that uses {url} is unknown: {error}") from None
    if snapshot is not None and snapshot.end is not None and snapshot.has(cluster):
        raise RefusedError(f"the job that uses {url} has ended ({how_it_has_ended(snapshot.end)})")
    if found.holder or snapshot is None or not may_go_on(found, snapshot.head):
        return found.holder, ""
    return "", (
        f"no host controls the job that uses {url}: {snapshot.head}, which controlled it, has failed, and no other "
        f"host has taken over within {_LEADER_S:g} s"
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
        raise _NoLeaderError(f"the head node of the job, {head}, doesn't answer: {error or 'timed out'}") from None
    except ValueError as error:  # no TLS library
        raise RefusedError(str(error)) from None
    except ProtocolError as error:
        raise RefusedError(f"the head node of the job, {head}, sent an invalid answer: {error}") from None


def _head_of(store: ClusterStore, cluster: Cluster) -> PeerID:
    """Return the head node: the host of the config server, or the first host if no host runs one (see `host_flags`)."""
    wanted = network.addresses_of_server(store.servers)
    for runner in cluster.runners:
        address = Host(runner.host).address
        if wanted & {address, *network.addresses_of(address)}:
            return runner
    return cluster.runners[0]


def _own_host(request: JoinRequest, head: PeerID) -> Host:
    """Return this host. By default, the host's name is the address from which the host reaches the controller."""
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
    trouble: object = "the name has no address"
    with contextlib.suppress(socket.gaierror):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)  # this sends no packet
                    return str(probe.getsockname()[0])
            except OSError as error:
                trouble = error
    raise _NoLeaderError(f"{host}, the head node of the job, can't be reached: {trouble}")


def options_from(terms: m.Terms, request: JoinRequest, own: Host) -> Options:
    """Return the options that follow from the job's settings (`terms`) and this host's own flags.

    Raises ValueError, TypeError, KeyError or ProtocolError if `terms` are invalid.
    """
    listed = [joining_host(name, slots, least=0) for name, slots in terms.hosts if name != own.name]
    flags: dict[str, Any] = {name: terms.flags[name] for name in _FROM_THE_CONTROLLER}
    if any(isinstance(value, str) for name, value in flags.items() if name not in _SPELT):
        raise ValueError("a flag has text instead of a number")
    for name, (_, understood) in _SPELT.items():
        try:
            flags[name] = understood(flags[name])
        except (AttributeError, argparse.ArgumentTypeError):
            raise ValueError(f"flag {name} has the invalid value {flags[name]!r}") from None
    ports = terms.ports and range(*terms.ports)
    hosts = Hosts((*listed, own), own.name, terms.head, terms.most, terms.placement, ports)
    if hosts.head_name not in hosts.names or hosts.is_head:
        raise ValueError("the terms name another controller")
    options = Options(
        tuple(map(os.fsdecode, terms.command)), watch=True, config_server=request.url, timeout_s=terms.left_s,
        hosts=hosts, joins=True, **flags,
    )  # fmt: skip
    return replace(options, **request.own_flags, secret=request.secret)
