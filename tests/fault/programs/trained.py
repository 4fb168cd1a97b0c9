"""What the programs history.py and plain.py train, so that they train the same. Needs nothing of ms_kungfu."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import mindspore as ms
from mindspore import nn, ops

SEED = 5  # of the order of the samples
SHARDS = 8
_NETWORKS = Path(__file__).resolve().parents[3] / "benchmarks" / "networks.py"


def _load_networks() -> Any:
    """By its path, since importing it by its name imports ms_kungfu."""
    spec = importlib.util.spec_from_file_location("networks", _NETWORKS)
    module = importlib.util.module_from_spec(spec)
    sys.modules["networks"] = module  # where MindSpore's parser looks for what the functions in it refer to
    spec.loader.exec_module(module)
    return module


networks = _load_networks()


@dataclass(frozen=True)
class Kind:
    """What is trained, and in which portions."""

    network: str
    unit: int
    """Samples of a shard."""
    total: int
    """Samples of an epoch. Its last two steps share what is left; where `unit` is 2 the last shard has 1."""
    optimizer: str
    has_dropout: bool = False


KINDS = {
    "lenet": Kind("lenet", 2, 181, "Momentum"),
    "resnet": Kind("resnet", 2, 181, "Adam", has_dropout=True),
    "transformer": Kind("transformer", 1, 91, "Adam", has_dropout=True),
    "resnet-without-dropout": Kind("resnet", 2, 181, "Adam"),
}
STEPS = 12


class Clipped(nn.Cell):
    """An update by gradients whose global norm is at most 1."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, gradients):
        return self.optimizer(ops.clip_by_global_norm(gradients, 1.0))


class Training:
    """A network, its optimizer, what computes a shard's loss and gradients, and what updates.

    `optimizers`: the module that has the optimizers; `prefix` their names'. `dropout` makes dropout layers.
    """

    def __init__(self, kind: Kind, optimizers: Any, prefix: str, dropout: Callable[[], Any] | None) -> None:
        self.kind = kind
        self.net = networks.NETWORKS[kind.network](dropout if kind.has_dropout else None)
        self.net.set_train()
        make = getattr(optimizers, prefix + kind.optimizer)
        rates = (0.01, 0.9) if kind.optimizer == "Momentum" else (0.01,)
        self.optimizer = make(self.net.trainable_params(), *rates)
        self.update = Clipped(self.optimizer) if kind.optimizer == "Adam" else self.optimizer
        loss = networks.Loss()

        def forward(x, labels):
            return loss(self.net(x), labels)

        self.compute = ms.value_and_grad(forward, None, self.net.trainable_params())
        self.samples = networks.Samples(kind.network, kind.total)

    @property
    def parameters(self) -> list[Any]:
        """All: the weights, the optimizer's state, moving statistics."""
        both = [*self.net.get_parameters(), *self.optimizer.get_parameters()]
        return list({id(p): p for p in both}.values())


def digest(parameters: Iterable[Any]) -> str:
    """SHA-256 of names and bits."""
    found = hashlib.sha256()
    for parameter in sorted(parameters, key=lambda p: p.name):
        found.update(parameter.name.encode() + parameter.asnumpy().tobytes())
    return found.hexdigest()
