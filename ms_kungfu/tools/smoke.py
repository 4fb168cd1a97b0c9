"""Check that a collective works and that two workers connect. install-kungfu.sh runs this module in two workers."""

from __future__ import annotations

import mindspore as ms
import numpy as np

import ms_kungfu
from ms_kungfu.ops import KungFuAllReduce


def main() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms_kungfu.init()
    rank, size = ms_kungfu.current_rank(), ms_kungfu.current_cluster_size()
    total = KungFuAllReduce()(ms.Tensor([rank + 1.0, 10.0 * rank], ms.float32)).asnumpy()
    ranks = range(size)
    expected = [sum(r + 1.0 for r in ranks), sum(10.0 * r for r in ranks)]
    if not np.array_equal(total, np.array(expected, np.float32)):
        raise SystemExit(f"rank {rank} of {size}: the sum is {total.tolist()}, expected {expected}")


if __name__ == "__main__":
    main()
