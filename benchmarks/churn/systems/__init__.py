"""The systems that are measured, by name."""

from __future__ import annotations

from benchmarks.churn.systems.base import System
from benchmarks.churn.systems.kungfu import KungFu
from benchmarks.churn.systems.msrun import MSRun
from benchmarks.churn.systems.ray_train import RayTrain
from benchmarks.churn.systems.torchft import TorchFT
from benchmarks.churn.systems.torchrun import TorchRun

OWN = "ms_kungfu"
PLAIN = "ms_kungfu without shards"
SYSTEMS: dict[str, System] = {
    OWN: KungFu(),
    PLAIN: KungFu(shards=False),
    "ms_kungfu+standby": KungFu(standby=1),
    "torchft": TorchFT(),
    "torchrun": TorchRun(),
    "Ray Train": RayTrain(),
    "msrun": MSRun(),
}
