"""The determinism probe, which tests that a shard's gradients depend only on the shard.

The probe runs in the first step of each cluster version that contains a new worker. All workers compare their numeric
environments, that is, the settings that affect numeric results. Then each worker computes the step's first shard, and
the workers compare the hashes of the gradients. The new workers compute the shard twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ms_kungfu import membership
from ms_kungfu.agreement import gather_json, gather_living
from ms_kungfu.dataset.conditions import differences
from ms_kungfu.errors import DivergenceError
from ms_kungfu.trained.claims import content_of

_log = logging.getLogger(__name__)

_CAUSES = (
    "possible causes: stock Dropout and random operations (docs/shards.md lists replacements), variables that "
    "the program keeps between steps, different numbers of cores, different processors"
)
LOSS = "the loss"


def difference(
    rows: Mapping[int, Sequence[int]], again: Mapping[int, Sequence[int]], names: Sequence[str | None]
) -> str | None:
    """Describe how the ranks' gradients differ. Return None if all gradients that have a name are equal.

    This function has no side effects.

    `rows`: each rank's hashes of its gradients. `again`: the hashes from the second computation on the new ranks.
    """
    first = min(rows)
    for i, name in enumerate(names):
        if name is None:
            continue
        for rank in rows:
            if rank in again and again[rank][i] != rows[rank][i]:
                return f"rank {rank} computed one shard twice, and {name} differs: {_CAUSES}"
        for rank in rows:
            if rows[rank][i] != rows[first][i]:
                return f"ranks {first} and {rank} computed the same shard, and {name} differs: {_CAUSES}"
    return None


def unequal(conditions: dict[int, Mapping[str, Any]]) -> str | None:
    """Describe how the settings that affect numeric results differ between the ranks; None if they are equal.

    This function has no side effects.
    """
    first = min(conditions)
    for rank, each in conditions.items():
        if told := differences(conditions[first], each, f"at rank {first}", f"at rank {rank}"):
            return f"the workers' numeric environments differ: {told}"
    return None


class DeterminismProbe:
    """The determinism probe of one `ShardedStep`."""

    def __init__(self) -> None:
        self._version = -1

    def look(
        self,
        version: int,
        check: str,
        compute: Callable[[int], Any],
        names: Callable[[int], list[str]],
        conditions: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Run the probe if it is due. Called before a step's first shard (collective).

        ``compute(shard)`` computes a shard but doesn't contribute its gradients. `conditions` returns the numeric
        environment.

        Raises:
            DivergenceError: on all workers, if the numeric environments or a gradient differ. If ``check`` is "warn",
                or if only the loss differs, the probe logs a warning instead.
        """
        if version == self._version:
            return
        new, self._version = self._version < 0, version
        mine = conditions()
        row = np.array([new, content_of(json.dumps(mine).encode())])
        told = gather_living(row, "kungfu/shards/new")
        if not any(each[0] for each in told.values()):
            return
        if len({int(each[1]) for each in told.values()}) > 1:
            self._say(unequal(gather_json(mine, "kungfu/shards/conditions")), check)
        hashes = [self._hashes(compute)]
        if new:
            hashes.append(self._hashes(compute))
        row = np.array([hashes[0], hashes[-1], [int(new)] * len(hashes[0])], np.uint64)
        told = gather_living(row, "kungfu/shards/hashes")
        rows = {rank: each[0].tolist() for rank, each in told.items()}
        again = {rank: each[1].tolist() for rank, each in told.items() if each[2][0]}
        called = names(len(hashes[0]))
        if (what := difference(rows, again, [None if name == LOSS else name for name in called])) is not None:
            self._say(what, check)
        else:  # a different loss is only worth a warning, because the weights don't depend on the loss
            self._say(difference(rows, again, [name if name == LOSS else None for name in called]), "warn")

    @staticmethod
    def _say(what: str | None, check: str) -> None:
        if what is not None and check == "raise":
            raise DivergenceError(what)
        if what is not None:
            _log.warning('determinism probe: finding="%s". Another run of this training may give other results', what)

    @staticmethod
    def _hashes(compute: Callable[[int], Any]) -> list[int]:
        core = membership.current().core
        core.take_shard_for_hashes(0)
        compute(0)
        hashes: list[int] = core.shard_hashes()
        return hashes
