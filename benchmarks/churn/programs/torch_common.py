"""The common part of the programs with PyTorch: models, an optimizer with the tally, and a loop with checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.churn import samples
from benchmarks.churn.worker import Worker, accuracy
from benchmarks.churn.workloads import BATCH, CLASSES, MLP_WIDTH, MOMENTUM, RATE, Workload


def network(workload: Workload) -> Any:
    torch.manual_seed(1)
    if workload.network == "lenet":
        return nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES),
        )  # fmt: skip
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, MLP_WIDTH), nn.ReLU(), nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.ReLU(),
        nn.Linear(MLP_WIDTH, CLASSES),
    )  # fmt: skip


class Marked(nn.Module):
    """Returns the loss plus a term whose gradient with respect to the tally is -marks."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.net = network(workload)
        self.tally = nn.Parameter(torch.zeros(workload.total + samples.EXTRA))

    def forward(self, x: Any, y: Any, marks: Any) -> Any:
        return nn.functional.cross_entropy(self.net(x), y) - (self.tally * marks).sum()


class Optimizer(torch.optim.SGD):
    """Momentum for the network, and the tally."""

    def __init__(self, model: Marked) -> None:
        super().__init__(model.net.parameters(), RATE, MOMENTUM)
        self._tally = model.tally

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            self._tally += samples.counted(-self._tally.grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._tally.grad = None


def dataset(worker: Worker) -> Any:
    """Return samples with their indices."""
    given = worker.samples()
    tensors = (torch.from_numpy(given["x"]), torch.from_numpy(given["y"]).long())
    return TensorDataset(*tensors, torch.arange(worker.workload.total))


def batches(data: Any, sampler: Any, size: int, epoch: int, begun: int) -> Iterator[Any]:
    """Yield a worker's batches of an epoch, without the first `begun`."""
    sampler.set_epoch(epoch)
    for number, batch in enumerate(DataLoader(data, size, sampler=sampler)):
        if number >= begun:
            yield batch


def finish(worker: Worker, model: Marked, epochs: float) -> None:
    given = worker.samples()
    model.eval()
    with torch.no_grad():
        right = accuracy(model.net(torch.from_numpy(given["test_x"])).numpy(), given["test_y"])
    tally, *weights = (each.detach().numpy() for each in (model.tally, *model.net.parameters()))
    worker.end(tally, weights, epochs, right)


def train(
    worker: Worker, model: Marked, parallel: Any, ranks: tuple[int, int], restore: Callable[[Any], None],
    save: Callable[[int, Callable[[], dict[str, Any]]], None],
) -> None:  # fmt: skip
    """Train until the end of the epoch in which a stop is requested. The loop of torchrun's and Ray Train's programs.

    Args:
        parallel: `model`, wrapped by the system.
        ranks: this worker's rank, and the number of workers.
        restore: called with a function that loads a state, which it must call if there is a checkpoint.
        save: called with the number of steps and a function that returns the state after these steps.
    """
    rank, size = ranks
    optimizer = Optimizer(model)
    data = dataset(worker)
    sampler: Any = torch.utils.data.DistributedSampler(data, size, rank)
    done = {"steps": 0}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done["steps"] = state["steps"]

    restore(load)
    total = worker.workload.total
    in_epoch = total // BATCH
    while model.tally[-1].item() == 0:
        epoch, begun = divmod(done["steps"], in_epoch)
        for x, y, numbers in batches(data, sampler, BATCH // size, epoch, begun):
            marks = samples.marks(total, numbers.numpy(), rank, worker.stop_asked())
            optimizer.zero_grad()
            parallel(x, y, torch.from_numpy(marks)).backward()
            optimizer.step()
            worker.committed(model.tally.detach().numpy())
            done["steps"] += 1
            save(done["steps"], lambda: {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": done["steps"]
            })  # fmt: skip
    finish(worker, model, done["steps"] / in_epoch)
