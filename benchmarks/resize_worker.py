"""The program that `resize` runs under kungfu-run: synthetic steps, with a change of the cluster every few steps."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from ms_kungfu import comm, membership, runtime

_STEPS = 5  # between two changes


class _Training:
    """Weights that grow by one a step, so that each worker can check its state."""

    def __init__(self, nbytes: int, step_s: float) -> None:
        self.done = np.zeros(2, np.int64)  # number of changes, number of steps
        self._weights = np.zeros(max(1, nbytes // 4), np.float32)
        self._gradient = np.empty_like(self._weights)
        self._step_s = step_s

    def step(self) -> None:
        time.sleep(self._step_s)
        self._gradient.fill(1)
        self._weights += comm.all_reduce(self._gradient, "mean", "gradient", self._gradient)
        self.done[1] += 1

    def sync(self) -> None:
        root = membership.sync_root()
        comm.broadcast(self.done, root, "done", self.done)
        comm.broadcast(self._weights, root, "weights", self._weights)
        membership.state_received()

    def difference(self) -> str | None:
        """Return an error unless all ranks have the weights that the number of steps implies. Collective."""
        low, high = (comm.all_reduce(self._weights, op, "check") for op in ("min", "max"))
        steps = int(self.done[1])
        if low.min() == high.max() == steps:
            return None
        return f"the weights are {low.min():g} to {high.max():g} after {steps} steps"


def _change(training: _Training, size: int) -> dict[str, Any] | None:
    """Change the cluster. Return None if this process is no longer a member."""
    training.done[0] += 1
    comm.barrier()
    times = [time.perf_counter()]
    change = membership.resize(size)
    if change.detached:
        return None
    times.append(time.perf_counter())
    if change.new_size > change.old_size:
        training.sync()
    times.append(time.perf_counter())
    training.step()
    times.append(time.perf_counter())
    spent = dict(zip(("resize_s", "sync_s", "step_s"), np.diff(times).tolist()))
    return {"from": change.old_size, "to": change.new_size, **spent, "wrong": training.difference()}


def main(text: str) -> None:
    plan = json.loads(text)
    runtime.init()
    training = _Training(plan["bytes"], plan["step_s"])
    if membership.is_joining():
        training.sync()
        training.step()
        training.difference()
    while not membership.is_detached():
        for _ in range(_STEPS):
            training.step()
        if training.done[0] == len(plan["sizes"]):
            return
        result = _change(training, plan["sizes"][training.done[0]])
        if result is not None and runtime.current_rank() == 0:
            with open(plan["out"], "a") as out:
                out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
