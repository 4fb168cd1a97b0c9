"""The program for torchft, based on its train_ddp.py: each worker is a replica group, with DDP and Gloo on CPUs.

The data is partitioned by torchft's own DistributedSampler. "We recommend using torchdata's StatefulDataLoader to
checkpoint each replica's dataloader frequently to avoid duplicate batches" (torchft.data): each replica group writes
its position to a file in each step. A batch whose step isn't committed is dropped, as in train_ddp.py. At a fixed
interval of steps, one replica writes a checkpoint with the manager's state, as the docstring of `Manager` requires. The
job resumes from this checkpoint if all replicas fail.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo
from torchft.data import DistributedSampler
from torchft.optim import OptimizerWrapper

from benchmarks.churn import samples
from benchmarks.churn.programs.torch_common import Marked, Optimizer, batches, dataset, finish
from benchmarks.churn.worker import Worker, read_plan
from benchmarks.churn.workloads import BATCH


def main(path: str) -> None:
    plan = read_plan(path)
    worker = Worker(plan)
    group = int(os.environ["REPLICA_GROUP_ID"])
    model = Marked(worker.workload)
    optimizer = Optimizer(model)
    total, share = worker.workload.total, BATCH // plan.workers

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"train_ddp_{group}",
    )
    parallel = DistributedDataParallel(manager, model)
    wrapped = OptimizerWrapper(manager, optimizer)
    worker.phase("network")
    data = dataset(worker)
    checkpoint = Path(plan.folder) / "checkpoint.pt"
    if checkpoint.exists():
        found = torch.load(checkpoint)
        load(found["user"])
        manager.load_state_dict(found["torchft"])
    sampler = DistributedSampler(data, group, plan.workers, group_rank=0, num_replicas=1)
    position = Path(plan.folder) / f"position.{group}"
    taken = int(position.read_text()) if position.exists() else 0
    in_epoch = total // BATCH
    while model.tally[-1].item() == 0:
        epoch, begun = divmod(taken, in_epoch)
        for x, y, numbers in batches(data, sampler, share, epoch, begun):
            marks = samples.marks(total, numbers.numpy(), group, worker.stop_asked())
            wrapped.zero_grad()
            before = manager.current_step()
            parallel(x, y, torch.from_numpy(marks)).backward()
            wrapped.step()
            taken += 1
            new = position.with_name(f"{position.name}.new")
            new.write_text(str(taken))
            os.replace(new, position)
            if manager.current_step() > before:
                worker.committed(model.tally.detach().numpy())
                if manager.current_step() % plan.checkpoint_every == 0 and manager.participating_rank() == 0:
                    written = checkpoint.with_name(f"checkpoint.{os.getpid()}")
                    torch.save({"user": state(), "torchft": manager.state_dict()}, written)
                    os.replace(written, checkpoint)
            if model.tally[-1].item() > 0:
                break
    finish(worker, model, manager.batches_committed() * share / total)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(sys.argv[1])
