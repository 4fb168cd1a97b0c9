"""The program that `parts` runs: ``Model.train`` with ms_kungfu, or with nn.Momentum alone.

The program adds three kinds of spans to its trace: `elastic callback` (a hook of KungFuElasticCallback), within that
`wait for MindSpore` (until the step's kernels have ended), and `ledger` (writing a line).
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.train import Callback, Model

from benchmarks.networks import NETWORKS, Loss, Samples


class _FirstStep(Callback):
    """Writes the seconds from `began_s` to the end of the first step, and the median seconds of the later steps."""

    def __init__(self, began_s: float, out: Path) -> None:
        self._began_s, self._out = began_s, out
        self._ends: list[float] = []

    def on_train_step_end(self, run_context: Any) -> None:
        ms.runtime.synchronize()
        self._ends.append(time.monotonic())

    def on_train_end(self, run_context: Any) -> None:
        steps = sorted(b - a for a, b in zip(self._ends[1:], self._ends[2:]))
        found = {"first_step_s": self._ends[0] - self._began_s, "step_s": steps[len(steps) // 2]}
        self._out.write_text(json.dumps(found))


def _trace(owner: Any, method: str, name: str) -> None:
    from ms_kungfu.membership import traced

    original = getattr(owner, method)

    @functools.wraps(original)
    def measured(*arguments: Any, **options: Any) -> Any:
        with traced(name):
            return original(*arguments, **options)

    setattr(owner, method, measured)


def main(plan: dict[str, Any]) -> None:
    ms.set_context(mode=ms.GRAPH_MODE if plan["mode"] == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(1)
    net, batch = NETWORKS[plan["network"]](), plan["batch"]
    ranks = 1 if plan["plain"] else plan["ranks"]
    samples = Samples(plan["network"], plan["steps"] * batch * ranks)
    pipeline = ds.NumpySlicesDataset((samples.x, samples.labels), ["x", "label"], shuffle=False)
    if plan["plain"]:
        optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        data, callbacks, name = pipeline.batch(batch), [], "plain"
    else:
        import ms_kungfu as kf
        from ms_kungfu.dataset.ledger import Ledger

        kf.init()
        for hook in ("on_train_step_begin", "on_train_step_end"):
            _trace(kf.callbacks.KungFuElasticCallback, hook, "elastic callback")
        _trace(Ledger, "step", "ledger")
        _trace(kf.ops, "wait_for_queue", "wait for MindSpore")
        optimizer = kf.optimizers.KungFuMomentum(net.trainable_params(), 0.01, 0.9)
        data = kf.dataset.ElasticDataset(
            pipeline, global_batch_size=batch * ranks, ledger=str(Path(plan["folder"], "ledger"))
        )
        callbacks, name = [kf.callbacks.KungFuElasticCallback()], str(kf.current_rank())
    first = _FirstStep(plan["began_s"], Path(plan["folder"], f"first-{name}.json"))
    Model(net, Loss(), optimizer).train(1, data, callbacks=[*callbacks, first], dataset_sink_mode=False)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
