"""Ray Train: docs.ray.io/en/latest/train/user-guides/fault-tolerance.html, `FailureConfig(max_failures=-1)`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.churn.systems.base import ROOT, Command, NotApplicable, System
from benchmarks.churn.worker import Plan


class RayTrain(System):
    checkpoints = True
    packages = ("ray", "torch", "numpy")

    def commands(self, plan: Plan, folder: Path) -> list[Command]:
        if plan.hosts:
            raise NotApplicable("not set up over network namespaces")
        # If the kill of a worker ends the driver, the job's retries restart it.
        words = [plan.python, "-m", "benchmarks.churn.programs.ray_train", str(folder / "plan.json")]
        env = {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
        return [Command("ray", words, env)]
