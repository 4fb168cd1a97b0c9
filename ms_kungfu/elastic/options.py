"""Define and check the options that `ElasticTraining` and `KungFuElasticCallback` have in common."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ms_kungfu._checks import at_least
from ms_kungfu.dataset import replaying
from ms_kungfu.elastic.eviction import Evict
from ms_kungfu.elastic.lr_rule import LRRule, parse_lr_rule
from ms_kungfu.elastic.policy import Policy, as_policy
from ms_kungfu.elastic.schedule import Schedule, parse_schedule
from ms_kungfu.elastic.state import Component
from ms_kungfu.monitoring.monitor import Monitor
from ms_kungfu.trained.inventory import check_averaged


@dataclass(frozen=True)
class Options:
    """The options; `ElasticTraining` documents each of them. Raise TypeError or ValueError if an option is invalid."""

    schedule: Schedule | None = None
    wait: bool = False
    components: Sequence[Component] = ()
    lr_rule: LRRule = "none"
    averaged: Sequence[Any] | None = None
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 3
    resume: bool = False
    policy: Policy | Sequence[Policy] | None = None
    monitor: Monitor | None = None
    evict: Evict | None = None
    asynchronous: bool | None = None

    def __post_init__(self) -> None:
        parse_schedule(self.schedule)
        parse_lr_rule(self.lr_rule)
        check_averaged(self.averaged)
        self._check_folder()
        as_policy(self.policy)
        if self.evict is not None and not callable(self.evict):
            raise TypeError(f"evict must be a function of the ranks to evict, got {self.evict!r}")
        if self.monitor is not None and not isinstance(self.monitor, Monitor):
            raise TypeError(f"monitor must be a ms_kungfu.monitoring.Monitor, got {self.monitor!r}")

    def as_run(self) -> Options:
        """Return the options for this run.

        In a replay, the options have no schedule and write no checkpoints. Training starts from the
        recorded checkpoint, if there is one.
        """
        replay = replaying.current()
        if replay is None:
            return self
        folder = replay.orders.checkpoints
        return replace(
            self, schedule=None, wait=False, checkpoint_dir=folder, checkpoint_every=None, resume=folder is not None
        )

    def _check_folder(self) -> None:
        folder, every = self.checkpoint_dir, self.checkpoint_every
        for name in ("checkpoint_every", "keep_checkpoints"):
            if getattr(self, name) is not None:
                at_least(1, getattr(self, name), name)
        if folder is None:
            if every is not None or self.resume:
                given = "checkpoint_every" if every is not None else "resume"
                raise ValueError(f"{given} needs a folder; give checkpoint_dir")
        elif Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"checkpoint_dir: {os.fspath(folder)} is not a folder")
