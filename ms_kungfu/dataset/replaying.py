"""A program that `ms_kungfu.replay` runs again: instead of recording its steps it compares them with those on record.

The replay leaves the program its orders in a file that KUNGFU_REPLAY names, and finds beside it what came of them. The
program ends where nothing is left to compare, or where something differs, by SystemExit: what it does when training is
over isn't done again.
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
_AS_IT_WAS = "start the program with the arguments and the data that it had"


@dataclass(frozen=True)
class Recorded:
    """A step with a fingerprint, as it is on record."""

    data: int
    epoch: int
    number: int
    """Of the step in its epoch."""
    step: int
    """The same since training began."""
    order: tuple[int, int, bool]
    """Samples, seed and shuffle, as of a `Claim`."""
    batch: tuple[Range, ...]
    unit: int
    """Samples of a shard."""
    tensors: tuple[tuple[tuple[int, ...], Mapping[str, str]], ...]
    """What workers had, each with the ranks that had the same."""

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Recorded:
        tensors = tuple((tuple(ranks), names) for ranks, names in values["tensors"])
        batch = tuple((first, last) for first, last in values["batch"])
        return Recorded(**{**values, "order": tuple(values["order"]), "batch": batch, "tensors": tensors})


@dataclass(frozen=True)
class Orders:
    """What the program is run again for."""

    recorded: Sequence[Recorded]
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Under which the training on record ran, by the number of the dataset."""
    checkpoints: str | None = None
    """A folder with the one to go on from; None: from the beginning."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Orders:
        values = json.loads(path.read_text())
        return Orders(**{**values, "recorded": [Recorded.from_json(each) for each in values["recorded"]]})


@dataclass(frozen=True)
class Outcome:
    """What has come of it so far."""

    same: int = 0
    """How many fingerprints were compared and the same."""
    step: int = 0
    """Of the last of them."""
    difference: str = ""
    """A sentence on the first that wasn't."""
    wrong: str = ""
    """A sentence on why the two can't be compared."""

    def save(self, orders: Path) -> None:
        path = _beside(orders)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self)))
        os.replace(unfinished, path)

    @staticmethod
    def load(orders: Path) -> Outcome:
        """That of a program which hasn't come to anything, too."""
        path = _beside(orders)
        return Outcome(**json.loads(path.read_text())) if path.exists() else Outcome()


def _beside(orders: Path) -> Path:
    return orders.with_name("outcome.json")


def difference(recorded: Recorded, tensors: Mapping[str, str]) -> str:
    """What differs from what is on record, in words that name a tensor; nothing where all is the same. Pure.

    ValueError where they haven't the same names.
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
        where = f" at {_ranks([r for ranks, _ in others for r in ranks])}; {_ranks(alike)} had the bits of this run"
    else:
        had = " and ".join(f"{checksum} at {_ranks(ranks)}" for ranks, checksum in others)
        where = f": {had}, {tensors[name]} here"
    more = len(differing) - 1
    return f"step {recorded.step}: parameter {name!r} differs{where} (and {more} more of {len(tensors)} tensors)"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


class Replay:
    """Of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.orders = Orders.load(path)
        self._left = {(each.data, each.epoch, each.number): each for each in self.orders.recorded}
        self._outcome = Outcome()

    def begin(self, data: int, conditions: Callable[[], Mapping[str, Any]]) -> Comparison:
        """Of one dataset; says first under what other conditions it is trained now."""
        told = differences(self.orders.conditions.get(str(data), {}), conditions())
        if told:
            _log.warning(
                'numeric environment differs: differing="%s". Bits may differ from the training on record by '
                "that alone",
                told,
            )
        return Comparison(self, data)

    def is_left(self, place: tuple[int, int, int]) -> bool:
        return place in self._left

    def compare(self, place: tuple[int, int, int], step: Step, common: Mapping[str, Any]) -> None:
        """The step of (dataset, epoch, number in it) is over. SystemExit where that was the last, or something isn't as
        it is on record."""
        if common["size"] > 1:
            self._end(wrong="a program is run again as one worker; leave kungfu-run out of the command, or give -np 1")
        recorded = self._left.pop(place, None)
        if recorded is None:
            return
        order = common["total"], common["seed"], common["shuffle"]
        unit = common["global_batch"] // common["shards"]
        for what, there, here in (
            ("samples, seed and shuffle", recorded.order, order),
            ("samples of a shard", recorded.unit, unit),
            ("positions of the batch", recorded.batch, step.batch),
        ):
            if there != here:
                self._end(wrong=f"step {recorded.step}: {what} were {there} and are {here}; {_AS_IT_WAS}")
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
    """Stands in the place of a dataset's `Ledger`."""

    def __init__(self, replay: Replay, data: int) -> None:
        self._replay = replay
        self._data = data

    def sync(self) -> None:
        """Nothing is recorded."""

    def wants_fingerprint(self, epoch: int, number: int, step: int) -> bool:
        return self._replay.is_left((self._data, epoch, number))

    def step(self, epoch: int, step: Step, rank: int, share: Iterable[Range], common: dict[str, Any]) -> None:
        self._replay.compare((self._data, epoch, step.number), step, common)

    def end(self, cursor: EpochCursor, rank: int, common: dict[str, Any]) -> None:
        """Nothing: a step's bits depend on all before it."""


def current() -> Replay | None:
    """The one that this process is run for, if it is."""
    path = env.REPLAY.get()
    return None if path is None else _open(path)


@cache
def _open(path: str) -> Replay:
    try:
        return Replay(Path(path))
    except OSError as error:
        reason = f"{env.REPLAY.name}={path} can't be read: {error.strerror}; python -m ms_kungfu.replay alone sets it"
        raise ValueError(reason) from None
