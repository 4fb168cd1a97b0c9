"""A Ray cluster whose nodes are raylets on this machine. `Raylets` has it in a process of its own: this module's."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

from tests.ports import free_port

# A raylet imports much of Python's, beside whatever else runs; and Ray's workers have the lowest priority otherwise.
ENVIRONMENT = {"RAY_raylet_start_wait_time_s": "180", "RAY_worker_niceness": "0"}


def why_not() -> str | None:
    """Why there can be none here."""
    return None if find_spec("ray") is not None else "Ray is not installed: pip install 'ms_kungfu[ray]'"


class Raylets:
    """`cpus`: how many the nodes have that it starts with; the driver's is the first."""

    def __init__(self, *cpus: int) -> None:
        environment = {**os.environ, **ENVIRONMENT}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.raylets", str(cpus[0])], text=True, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.address = self._answer()
        for count in cpus[1:]:
            self.add(count)

    def add(self, cpus: int) -> str:
        """The new node's ID."""
        return self._ask(f"add {cpus}")

    def remove(self, node: str) -> None:
        """Without notice."""
        self._ask(f"remove {node}")

    def drain(self, node: str) -> None:
        """Ray says that the node is about to go."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.address]
        command += ["--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True, capture_output=True, timeout=120)

    def close(self) -> None:
        try:
            self._process.communicate(timeout=60)  # which closes its input
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, what: str) -> str:
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        while line := self._process.stdout.readline():
            if line.startswith("answer "):
                return line.split()[1]
        raise RuntimeError(f"the raylets have ended, with {self._process.wait()}")


def ports() -> dict[str, int]:
    """For a raylet's agents. It would wait a few seconds for them to choose some, and end where they take longer."""
    agents = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    return {agent: free_port() for agent in agents}


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": int(sys.argv[1]), "include_dashboard": False, **ports()}
    )
    nodes = {}
    print("answer", cluster.address, flush=True)
    for line in sys.stdin:
        what, argument = line.split()
        if what == "add":
            node = cluster.add_node(num_cpus=int(argument), **ports())
            nodes[node.node_id] = node
            print("answer", node.node_id, flush=True)
        else:
            cluster.remove_node(nodes[argument], allow_graceful=False)
            print("answer done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
