"""Run a program again for `ms_kungfu.replay`, and compare its steps with the recorded ones.

The replay command writes the recorded steps to the file that KUNGFU_REPLAY names, and reads the result from a file next
to that file. As soon as a step differs, or no step is left to compare, the program ends with SystemExit. So the
program's work after training isn't repeated.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Callable, NoReturn

from ms_kungfu import env
from ms_kungfu.dataset.conditions import differences
from ms_kungfu.dataset.sharding import EpochCursor, Range, Step

_log = logging.getLogger(__name__)
_AS_IT_WAS = "start the program with the arguments and the data of the recorded run"


@dataclass(frozen=True)
class Recorded:
    """A recorded step with a fingerprint."""

    data: int
    epoch: int
    number: int
    """Number of the step in its epoch."""
    step: int
    """Number of the step since training began."""
    order: tuple[int, int, bool]
    """(samples, seed, shuffle), as in `Claim.order`."""
    batch: tuple[Range, ...]
    unit: int
    """Number of samples per shard."""
    tensors: tuple[tuple[tuple[int, ...], Mapping[str, str]], ...]
    """Each distinct set of checksums, together with the ranks that recorded it."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Recorded:
        tensors = tuple((tuple(ranks), names) for ranks, names in values["tensors"])
        batch = tuple((first, last) for first, last in values["batch"])
        return Recorded(**{**values, "order": tuple(values["order"]), "batch": batch, "tensors": tensors})


@dataclass(frozen=True)
class Orders:
    """The recorded steps that a replay must reproduce, and the checkpoint from which the replay starts."""

    recorded: Sequence[Recorded]
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The numeric environment of the recorded training run, by dataset number."""
    checkpoints: str | None = None
    """The folder with the checkpoint to continue from; None to start from the beginning."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Orders:
        values = json.loads(path.read_text())
        return Orders(**{**values, "recorded": [Recorded.from_json(each) for each in values["recorded"]]})


@dataclass(frozen=True)
class Outcome:
    """The result of a replay so far."""

    same: int = 0
    """Number of fingerprints that were compared and found equal."""
    step: int = 0
    """The last step with an equal fingerprint."""
    difference: str = ""
    """A message that describes the first difference."""
    wrong: str = ""
    """A message with the reason why the runs can't be compared."""

    def save(self, orders: Path) -> None:
        path = _beside(orders)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self)))
        os.replace(unfinished, path)

    @staticmethod
    def load(orders: Path) -> Outcome:
        """Return the result of the replay, or an empty result if the program wrote none."""
        path = _beside(orders)
        return Outcome(**json.loads(path.read_text())) if path.exists() else Outcome()


def _beside(orders: Path) -> Path:
    return orders.with_name("outcome.json")


def difference(recorded: Recorded, tensors: Mapping[str, str]) -> str:
    """Return a message that names a tensor that differs from the record; empty if no tensor differs.

    Raise ValueError if the names of the tensors differ.
    """
    for _, names in recorded.tensors:
        if unknown := sorted(set(names) ^ set(tensors)):
            side = "on record" if unknown[0] in names else "in this program"
            raise ValueError(f"step {recorded.step}: parameter {unknown[0]!r} is {side} only; {_AS_IT_WAS}")
    differing = [name for name in tensors if any(names[name] != tensors[name] for _, names in recorded.tensors)]
    if not differing:
        return ""
    name = differing[0]
    others = [(ranks, names[name]) for ranks, names in recorded.tensors if names[name] != tensors[name]]
    alike = [rank for ranks, names in recorded.tensors if names[name] == tensors[name] for rank in ranks]
    if alike:
        where = (
            f" at {_ranks([r for ranks, _ in others for r in ranks])}; {_ranks(alike)} had the same bits as this run"
        )
    else:
        had = " and ".join(f"{checksum} at {_ranks(ranks)}" for ranks, checksum in others)
        where = f": {had}, {tensors[name]} here"
    more = len(differing) - 1
    return f"step {recorded.step}: parameter {name!r} differs{where} (and {more} more of {len(tensors)} tensors)"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


class Replay:
    """The replay of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.orders = Orders.load(path)
        self._left = {(each.data, each.epoch, each.number): each for each in self.orders.recorded}
        self._outcome = Outcome()

    def begin(self, data: int, conditions: Callable[[], Mapping[str, Any]]) -> Comparison:
        """Start to compare the steps of one dataset. Warn if the numeric environment differs from the record."""
        told = differences(self.orders.conditions.get(str(data), {}), conditions())
        if told:
            _log.warning(
                'numeric environment differs: differing="%s". For this reason alone, results may differ from the '
                "recorded training run",
                told,
            )
        return Comparison(self, data)

    def is_left(self, place: tuple[int, int, int]) -> bool:
        return place in self._left

    def compare(self, place: tuple[int, int, int], step: Step, common: Mapping[str, Any]) -> None:
        """Compare the step that has just ended with its record. `place` is (dataset, epoch, number in the epoch).

        Raise SystemExit if the steps differ, or if no recorded step is left.
        """
        if common["size"] > 1:
            self._end(
                wrong="a replay runs the program as one worker; leave kungfu-run out of the command, or pass -np 1"
            )
        recorded = self._left.pop(place, None)
        if recorded is None:
            return
        order = common["total"], common["seed"], common["shuffle"]
        unit = common["global_batch"] // common["shards"]
        for what, there, here in (
            ("the number of samples, seed and shuffle", recorded.order, order),
            ("the samples per shard", recorded.unit, unit),
            ("the positions in the batch", recorded.batch, step.batch),
        ):
            if there != here:
                self._end(
                    wrong=f"step {recorded.step}: {what} were {there} in the recorded run and are {here} now; "
                    f"{_AS_IT_WAS}"
                )
        try:
            differing = difference(recorded, common["fingerprint"]["tensors"])
        except ValueError as error:
            self._end(wrong=str(error))
        if differing:
            self._end(difference=differing)
        self._outcome = Outcome(self._outcome.same + 1, recorded.step)
        self._outcome.save(self._path)
        if not self._left:
            raise SystemExit(0)

    def _end(self, **outcome: str) -> NoReturn:
        replace(self._outcome, **outcome).save(self._path)  # type: ignore[arg-type]
        raise SystemExit(1)


class Comparison:
    """Compare a dataset's steps with recorded steps. A `Comparison` takes the place of the dataset's `Ledger`."""

    def __init__(self, replay: Replay, data: int) -> None:
        self._replay = replay
        self._data = data

    def sync(self) -> None:
        """Do nothing, because a replay records nothing."""

    def wants_fingerprint(self, epoch: int, number: int, step: int) -> bool:
        return self._replay.is_left((self._data, epoch, number))

    def step(self, epoch: int, step: Step, rank: int, share: Iterable[Range], common: dict[str, Any]) -> None:
        self._replay.compare((self._data, epoch, step.number), step, common)

    def end(self, cursor: EpochCursor, rank: int, common: dict[str, Any]) -> None:
        """Do nothing, because the end of an epoch has no fingerprint to compare."""


def current() -> Replay | None:
    """Return the replay for which this process was started; None if there is none."""
    path = env.REPLAY.get()
    return None if path is None else _open(path)


@cache
def _open(path: str) -> Replay:
    try:
        return Replay(Path(path))
    except OSError as error:
        reason = (
            f"{env.REPLAY.name}={path} can't be read: {error.strerror}; only python -m ms_kungfu.replay sets "
            "this variable"
        )
        raise ValueError(reason) from None
