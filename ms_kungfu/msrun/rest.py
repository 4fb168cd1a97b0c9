"""Handle cells that only some workers have, as in ``if get_rank() == 0: average = Average(net)``.

Cells that all workers have are kept equal. This module handles the other cells, of which each worker keeps its own. If
a joining worker has such a cell, it receives the cell's values from a worker with the same cell.

1. The workers find the common cells by comparing the living workers' lists of cells, and compare again when a worker
   joins. So all workers get the same result (`agree`).
2. A cell may be missing on some workers only if no optimizer trains the cell. If an optimizer trains such a cell, the
   workers run different programs, and all workers raise an error.
3. The cluster changes after the last step of a pass. Before the change, all workers copy the cells that only some
   workers have (`copy`). So a cell isn't lost if the only worker with that cell is removed. If that worker fails during
   a pass, the copy is from the end of the previous pass, and a warning is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from mindspore import nn

from ms_kungfu import membership
from ms_kungfu.agreement import broadcast_json, gather_json
from ms_kungfu.callbacks.codec import pack, unpack
from ms_kungfu.elastic import state_transfer
from ms_kungfu.errors import KungFuError
from ms_kungfu.trained import inventory

_log = logging.getLogger(__name__)
_SHOWN = 3


def named(cells: Iterable[Any]) -> dict[str, Any]:
    """Return a dict from key to cell, with the same keys on all workers.

    A key contains the cell's class, a checksum of the descriptions of the cell's parameters, and a number.
    """
    found: dict[str, Any] = {}
    for cell in cells:
        word = f"{type(cell).__name__} {inventory.fingerprint(cell.get_parameters()):x}"
        found[f"{word} {sum(key.startswith(word) for key in found)}"] = cell
    return found


def apart(everyones: Mapping[int, Iterable[str]]) -> dict[str, list[int]]:
    """Return the names that only some ranks have, each with a list of these ranks.

    The names are sorted by the lowest rank that has the name.
    """
    having: dict[str, list[int]] = {}
    for rank, names in sorted(everyones.items()):
        for name in names:
            having.setdefault(name, []).append(rank)
    return {name: ranks for name, ranks in having.items() if len(ranks) < len(everyones)}


class Rest:
    """This worker's cells that may be missing on other workers. `cells`: all outermost cells of this worker."""

    def __init__(self, cells: Iterable[Any]) -> None:
        self._cells = named(cells)
        self._apart: dict[str, list[int]] = {}
        self._copies: dict[str, Any] = {}  # key of a cell -> its packed values from the last `copy`
        self._told = False

    def agree(self, joins: bool) -> list[Any]:
        """Return the cells that all workers have. All workers must call this at the same time.

        If this worker is joining (`joins`), it also gets the values of its other cells.

        Raises:
            KungFuError: an optimizer trains a cell that only some workers have. All workers raise this error.
        """
        row = {"cells": list(self._cells), "copies": list(self._copies), "joins": joins}
        everyones = gather_json(row, "kungfu/msrun/cells")
        self._apart = apart({rank: each["cells"] for rank, each in everyones.items()})
        common = [cell for name, cell in self._cells.items() if name not in self._apart]
        if self._apart:
            self._check(common)
            self._tell()
        for name, ranks in self._apart.items():
            if any(everyones[rank]["joins"] for rank in ranks):
                self._hand_over(name, everyones, joins)
        return common

    def _check(self, common: list[Any]) -> None:
        kept = _ids(common)
        optimizers = [c for c in inventory.collect_cells(self._cells.values()).values() if isinstance(c, nn.Optimizer)]
        trained = _ids(optimizers) - kept
        own = [p for name in self._apart if name in self._cells for p in self._cells[name].get_parameters()]
        told = gather_json(state_transfer.described(p for p in own if id(p) in trained), "kungfu/msrun/trained")
        if any(told.values()):
            raise KungFuError(state_transfer.first_difference(told))

    def _tell(self) -> None:
        if self._told or not membership.speaks_for_all():
            return
        self._told = True
        told = [f"{name.split()[0]} (rank {', '.join(map(str, ranks))})" for name, ranks in self._apart.items()]
        more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        _log.info(
            'msrun: cells="%s%s". Only some workers have these cells; all other cells are kept equal',
            ", ".join(told[:_SHOWN]), more,
        )  # fmt: skip

    def _hand_over(self, name: str, everyones: Mapping[int, Mapping[str, Any]], joins: bool) -> None:
        """Send a cell's values to the joining workers that have the cell. All workers must call this.

        The values come from a worker that has the cell, or from a copy.
        """
        live = [rank for rank in self._apart[name] if not everyones[rank]["joins"]]
        copies = [rank for rank, each in everyones.items() if name in each["copies"] and not each["joins"]]
        packed = None
        if live or copies:
            able = not joins and (name in self._cells or name in self._copies)
            packed = self._received(name, able, live[0] if live else None)
        if packed is not None:
            self._copies[name] = packed
        if not joins or name not in self._cells:
            return
        what = type(self._cells[name]).__name__
        if packed is None:
            _log.warning('msrun: cell=%s action="begins anew" reason="each worker with this cell has failed"', what)
            return
        if not live:
            _log.warning(
                'msrun: cell=%s action="goes on from the end of the last pass" reason="each worker with this '
                'cell has failed"',
                what,
            )
        kept = _ids(cell for other, cell in self._cells.items() if other not in self._apart)
        for parameter, values in zip(self._cells[name].get_parameters(), unpack(packed)):
            if id(parameter) not in kept:  # parameters of common cells get their values with the training state
                inventory.assign(parameter, values)

    def copy(self) -> None:
        """Copy to all workers the cells that only some workers have. All workers call this before a cluster change."""
        for name, ranks in self._apart.items():
            packed = self._received(name, name in self._cells or name in self._copies, ranks[0])
            if packed is not None:
                self._copies[name] = packed

    def _received(self, name: str, able: bool, preferred: int | None) -> Any:
        """Return the packed values of a cell; None if all workers that are `able` to send them have failed.

        All workers must call this at the same time.
        """

        def values() -> Any:
            if name in self._cells:
                return pack([parameter.asnumpy() for parameter in self._cells[name].get_parameters()])
            return self._copies[name]

        try:
            return state_transfer.from_lowest_rank(partial(broadcast_json, values), able=able, preferred=preferred)
        except state_transfer.StateLostError:
            return None


def _ids(cells: Iterable[Any]) -> set[int]:
    return {id(parameter) for cell in cells for parameter in cell.get_parameters()}
