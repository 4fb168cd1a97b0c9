"""A LeNet step with KungFuMomentum on one worker against one with nn.Momentum, interleaved: `... graph|pynative PAIRS`.

Prints the medians in milliseconds and the ratio of the two.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

sys.path.append(str(Path(__file__).resolve().parents[3]))  # benchmarks
from benchmarks.contenders._training import training_step

ms.set_context(mode=ms.GRAPH_MODE if sys.argv[1] == "graph" else ms.PYNATIVE_MODE)
images = Tensor(np.random.RandomState(0).rand(32, 1, 28, 28).astype(np.float32))
labels = Tensor(np.arange(32, dtype=np.int32) % 10)
steps = {name: training_step(name) for name in ("nn.Momentum", "KungFuMomentum")}
times: dict[str, list[float]] = {name: [] for name in steps}
for pair in range(int(sys.argv[2]) + 5):
    order = list(steps) if pair % 2 else list(steps)[::-1]
    for name in order:
        start = time.perf_counter()
        steps[name](images, labels).asnumpy()
        if pair >= 5:
            times[name].append(time.perf_counter() - start)
plain, ours = (float(np.median(times[name])) * 1e3 for name in steps)
print(f"plain {plain:.3f} ms, ours {ours:.3f} ms, ratio {ours / plain:.4f}")
