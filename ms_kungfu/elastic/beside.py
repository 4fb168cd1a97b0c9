"""Warn about cells that look like copies of a trained network but aren't part of the training state.

Examples of such copies are a moving average of the weights, and a target network. A joining worker doesn't receive
these copies, and a checkpoint doesn't contain them. ms_kungfu can't know the purpose of a copy, so it only warns.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ms_kungfu import env, membership
from ms_kungfu.trained import claims, inventory

_log = logging.getLogger(__name__)
# After these steps, each copy is compared with its initial content. A copy that never changes (e.g. a teacher network)
# isn't state.
_LOOKS = (1, 10, 100)
_NAMES = 3


class Beside:
    """Find copies of a trained network, and warn about them once per process."""

    _told = False

    def __init__(self) -> None:
        self._found: list[tuple[weakref.ref[Any], int]] = []  # copies, with their initial content
        self._steps = 0

    def look(self, trained: Iterable[Any], optimizers: Iterable[Any], carried: Iterable[Any]) -> None:
        """Find the copies of trained networks. Called when training begins."""
        if Beside._told or not _in_a_job():
            return
        copies = copies_of([list(optimizer.parameters) for optimizer in optimizers], trained, carried)
        self._found = [(weakref.ref(cell), claims.content(cell.get_parameters())) for cell in copies]

    def step_end(self) -> None:
        """Compare the copies with their initial content, but only after the steps in `_LOOKS`."""
        if not self._found:
            return
        self._steps += 1
        if self._steps in _LOOKS:
            self.warn_of_changed()

    def warn_of_changed(self) -> None:
        """Warn if a copy has changed. Called after a cluster change too, because a joining worker lacks the copy."""
        if Beside._told or not self._found or not membership.speaks_for_all():
            return
        cells = [(known(), content) for known, content in self._found]
        changed = [c for c, was in cells if c is not None and claims.content(c.get_parameters()) != was]
        if not changed:
            return
        Beside._told = True
        _log.warning(
            'misuse: check=beside changed="%s". Training changes this copy of the network (a cell whose parameters '
            "have the same names), but the copy isn't part of the training state: a joining worker doesn't receive it, "
            "and a checkpoint doesn't contain it; pass the copy to ElasticTraining(net, optimizer, ...), or its state "
            'as components= (docs/elastic-training.md, "State beside the network")',
            ", ".join(map(_described, changed)),
        )


def _in_a_job() -> bool:
    return env.BROKER.get() is not None


def _described(cell: Any) -> str:
    names = [parameter.name for parameter in cell.get_parameters()]
    more = f", and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"a {type(cell).__name__} ({', '.join(names[:_NAMES])}{more})"


def copies_of(networks: Sequence[Sequence[Any]], trained: Iterable[Any], carried: Iterable[Any]) -> list[Any]:
    """Return the outermost living cells that look like copies of one of `networks`.

    A cell looks like a copy if, for each Parameter of the network, the cell has its own Parameter of the same name and
    shape. The names in the copy may have a common prefix. The result excludes cells in `trained`, and cells whose
    Parameters are in `carried`.
    """
    import mindspore as ms

    known = {id(cell) for cell in inventory.collect_cells(trained).values()}
    ours = {id(parameter) for parameter in carried}
    found = []
    for cell in gc.get_objects():
        if not issubclass(type(cell), ms.nn.Cell) or issubclass(type(cell), ms.nn.Optimizer) or id(cell) in known:
            continue
        shapes = {p.name: tuple(p.shape) for p in cell.get_parameters() if id(p) not in ours}
        if any(network and _has_all(shapes, network) for network in networks):
            found.append(cell)
    inner = {id(cell) for outer in found for _, cell in outer.cells_and_names() if cell is not outer}
    return [cell for cell in found if id(cell) not in inner]


def _has_all(shapes: dict[str, tuple[int, ...]], network: Sequence[Any]) -> bool:
    first = network[0].name
    prefixes = [name[: -len(first)] for name in shapes if name.endswith(first)]
    return any(all(shapes.get(prefix + p.name) == tuple(p.shape) for p in network) for prefix in prefixes)
