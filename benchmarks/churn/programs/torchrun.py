"""The program for torchrun, as in PyTorch's "Fault-tolerant Distributed Training with torchrun".

After a failure, torchrun restarts all workers, which load the last snapshot. Snapshots have a fixed interval of steps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist

from benchmarks.churn.programs.torch_common import Marked, train
from benchmarks.churn.worker import Worker, read_plan


def main(path: str) -> None:
    plan = read_plan(path)
    worker = Worker(plan)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    file = Path(plan.folder) / "snapshot.pt"

    def restore(load: Callable[[Any], None]) -> None:
        if file.exists():
            load(torch.load(file))

    def save(steps: int, state: Callable[[], dict[str, Any]]) -> None:
        if rank == 0 and steps % plan.checkpoint_every == 0:
            new = file.with_name(f"snapshot.{os.getpid()}")
            torch.save(state(), new)
            os.replace(new, file)

    model = Marked(worker.workload)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    worker.phase("network")
    train(worker, model, parallel, (rank, dist.get_world_size()), restore, save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
