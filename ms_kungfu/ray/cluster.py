"""Make requests to Ray: list its nodes, reserve a part of a node, and ask for more nodes."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Callable, NamedTuple

import ray
from ray._private import state  # only this Ray module reports a node's free resources, and which nodes are draining
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ms_kungfu._run_time import run_time
from ms_kungfu.ray.agent import Agent
from ms_kungfu.ray.placing import Node

_CALL_S = 5.0
_LOOK_S = 0.02
_AT_A_TIME = 8  # how many methods of an agent may run at the same time


class Connection(NamedTuple):
    """A connection to Ray.

    `ours`: whether this module has connected the program to Ray, and must disconnect it. `found`: whether the cluster
    was found on this machine, because the user hasn't named a cluster.
    """

    ours: bool
    found: bool


def connect(address: str | None, runtime_env: Mapping[str, Any] | None) -> Connection:
    """Connect to a cluster.

    If `address` is None, use a cluster that is running on this machine. If no cluster is running, start a cluster for
    this program only.

    Raises:
        ConnectionError: there is no cluster at `address`.
    """
    if ray.is_initialized():
        return Connection(False, False)
    more: dict[str, Any] = {"logging_level": "WARNING"}
    if runtime_env:
        more["runtime_env"] = dict(runtime_env)
    if address != "local":
        try:
            _check_there(address or "auto")
            ray.init(address or "auto", **more)
            return Connection(True, address is None)
        except ConnectionError:
            if address is not None:
                raise
    ray.init("local", include_dashboard=False, **more)
    return Connection(True, False)


def _check_there(address: str) -> None:
    """Check an address before Ray uses it, because Ray itself would retry for two minutes.

    Raises:
        ConnectionError: nothing listens at the address.
        ValueError: the address has an unsupported form.
    """
    if "://" in address:
        raise ValueError("the driver must run on a node of the cluster; give HOST:PORT, or use `ray job submit`")
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            "that is not an address; give HOST:PORT, 'auto' (a cluster that runs here) or 'local' (a new one)"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CALL_S).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from None


def own_address() -> str:
    """Return the cluster's address, with which other nodes can join the cluster."""
    return str(ray.get_runtime_context().gcs_address)


def own_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def nodes() -> list[Node]:
    """Return the live nodes."""
    free, leaving = state.available_resources_per_node(), state.state.get_draining_nodes()
    return [
        Node(each["NodeID"], each["NodeManagerAddress"], free.get(each["NodeID"], {}), each["NodeID"] in leaving)
        for each in ray.nodes()
        if each["Alive"]
    ]


class Watch:
    """Call `nodes` in a separate thread, because the call may block.

    If the GCS on Ray's head node is lost, Ray doesn't answer, and after a minute Ray ends this process.
    """

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[list[Node] | Exception] = queue.SimpleQueue()
        self._asked_at: float | None = None

    def answer(self) -> list[Node] | None:
        """Return the nodes, or None if Ray hasn't answered yet and the caller must call again later."""
        if self._asked_at is None:
            self._asked_at = run_time()
            threading.Thread(target=self._ask, daemon=True).start()
        try:
            found = self._answers.get_nowait()
        except queue.Empty:
            return None
        self._asked_at = None
        if isinstance(found, Exception):
            raise found
        return found

    def _ask(self) -> None:
        try:
            self._answers.put(nodes())
        except Exception as error:  # `answer` raises the error in the driver's thread
            self._answers.put(error)

    def silent_s(self) -> float:
        """Return the number of seconds for which this object has waited for an answer."""
        return 0.0 if self._asked_at is None else run_time() - self._asked_at


def in_time(call: Callable[[], object], limit_s: float) -> bool:
    """Call a Ray function in a thread. Return whether the call has ended in time. Its exceptions are ignored."""

    def run() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def wish(needs: Mapping[str, float], count: int) -> None:
    """Ask the autoscaler, if there is one, to provide resources for `count` workers."""
    request_resources(bundles=[dict(needs)] * count)


def reserve(node: str, needs: Mapping[str, float], slots: int) -> PlacementGroup:
    """Reserve resources for `slots` workers on a node, for the agent on that node. Ray grants the resources later."""
    bundle = {name: count * slots for name, count in needs.items()}
    return placement_group([bundle], bundle_label_selector=[{"ray.io/node-id": node}])


def start_agent(node: str, group: PlacementGroup | None, needs: Mapping[str, float], slots: int) -> Any:
    """Start an agent on a node, with the resources that `group` has reserved, or without resources if it is None."""
    where: object = NodeAffinitySchedulingStrategy(node, soft=False)
    if group is not None:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    taken = {name: count * slots for name, count in needs.items()}
    actor = ray.remote(Agent).options(
        num_cpus=taken.pop("CPU", 0), num_gpus=taken.pop("GPU", 0), resources=taken, scheduling_strategy=where,
        max_concurrency=_AT_A_TIME, max_restarts=0, max_task_retries=0,
    )  # fmt: skip
    return actor.remote()


def end_agent(agent: Any) -> None:
    """End an agent immediately, together with all processes that it has started."""
    with contextlib.suppress(Exception):  # the node or Ray may have ended
        ray.kill(agent)


def give_back(groups: Iterable[PlacementGroup], limit_s: float) -> None:
    """Release reserved resources. Return when Ray reports the resources as free, or after `limit_s` seconds."""
    left = {group.id.hex() for group in groups}
    for group in groups:
        with contextlib.suppress(Exception):
            remove_placement_group(group)
    # Ray reports a group as removed before the nodes have their resources back. While a group's resources aren't back,
    # a node's resources include names that contain the group's ID.
    deadline = run_time() + limit_s
    while left and run_time() < deadline:
        held = {name for resources in state.available_resources_per_node().values() for name in resources}
        left = {group for group in left if any(group in name for name in held)}
        time.sleep(_LOOK_S if left else 0)
