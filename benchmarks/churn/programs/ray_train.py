"""The program for Ray Train, as in its guide "Handling Failures and Node Preemption": TorchTrainer, FailureConfig.

`max_failures=-1` restarts the workers after each failure, from the last checkpoint that was reported.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

import ray
import ray.train
import ray.train.torch
import torch

from benchmarks.churn.programs.torch_common import Marked, train
from benchmarks.churn.worker import Worker, read_plan


def loop(config: dict[str, Any]) -> None:
    plan = read_plan(config["plan"])
    worker = Worker(plan)
    model = Marked(worker.workload)
    parallel = ray.train.torch.prepare_model(model)
    worker.phase("network")
    context = ray.train.get_context()
    rank = context.get_world_rank()

    def restore(load: Callable[[Any], None]) -> None:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as folder:
                load(torch.load(Path(folder) / "state.pt"))

    def save(steps: int, state: Callable[[], dict[str, Any]]) -> None:
        if steps % plan.checkpoint_every:
            return
        # All workers must report; Ray keeps the checkpoint of rank 0.
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                torch.save(state(), Path(folder) / "state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"steps": steps}, checkpoint=checkpoint)

    train(worker, model, parallel, (rank, context.get_world_size()), restore, save)


def main(path: str) -> None:
    plan = read_plan(path)
    ray.init(num_cpus=plan.workers, include_dashboard=False)
    run = ray.train.RunConfig(
        name="churn",
        storage_path=str(Path(plan.folder) / "ray"),
        failure_config=ray.train.FailureConfig(max_failures=-1),
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
    )
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"plan": path},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=plan.workers, resources_per_worker={"CPU": 1}),
        run_config=run,
    )
    trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1])
