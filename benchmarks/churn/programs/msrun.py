"""The program for MindSpore's own msrun: data parallelism, and a checkpoint at a fixed interval of steps.

It follows MindSpore's tutorial "Dynamic cluster startup": `init`, DATA_PARALLEL, a `DistributedGradReducer`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init

from benchmarks.churn import samples
from benchmarks.churn.programs.mindspore_common import Step, network, scores
from benchmarks.churn.worker import Worker, accuracy, read_plan
from benchmarks.churn.workloads import BATCH


def main(path: str) -> None:
    plan = read_plan(path)
    # msrun's scheduler also runs this program, but only up to `init`.
    worker = Worker(plan, spare=os.environ.get("MS_ROLE") == "MS_SCHED")
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    rank, size = get_rank(), get_group_size()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    given, total = worker.samples(), worker.workload.total
    net = network(worker.workload)
    step = Step(net, total, lambda parameters: nn.DistributedGradReducer(parameters, True, size))
    step.set_train()
    worker.phase("network")
    file = Path(plan.folder) / "checkpoint.ckpt"
    if file.exists():
        found = ms.load_checkpoint(str(file))
        ms.load_param_into_net(step, found)
    steps = int(np.rint(step.tally.asnumpy()[:total].sum())) // BATCH
    in_epoch = total // BATCH
    while steps % in_epoch or step.tally.asnumpy()[-1] == 0:
        batch = np.random.default_rng(steps // in_epoch).permutation(total).reshape(in_epoch, BATCH)[steps % in_epoch]
        own = batch[rank::size]
        marks = samples.marks(total, own, rank, worker.stop_asked())
        step(ms.Tensor(given["x"][own]), ms.Tensor(given["y"][own]), ms.Tensor(marks))
        worker.committed(step.tally.asnumpy())
        steps += 1
        if rank == 0 and steps % plan.checkpoint_every == 0:
            new = file.with_name("new.ckpt")
            ms.save_checkpoint(step, str(new))
            os.replace(new, file)
    right = accuracy(scores(net, given["test_x"]), given["test_y"])
    weights = [each.asnumpy() for each in net.trainable_params()]
    worker.end(step.tally.asnumpy(), weights, steps / in_epoch, right)


if __name__ == "__main__":
    main(sys.argv[1])
