"""The model store for single tensors, outside of a graph."""

from __future__ import annotations

from mindspore import Tensor

from ms_kungfu import comm
from ms_kungfu.ops._sync import wait_for_queue


def save_variable(variable: Tensor, name: str | None = None) -> int:
    """Keep a copy of a parameter or tensor for the other workers to `request_variable`, under its own name by default;
    returns its version, from 1. Nobody is waited for: `ms_kungfu.comm.save`."""
    name = name or getattr(variable, "name", None)
    if not name:
        raise ValueError("a tensor that is no parameter has no name; give name=")
    wait_for_queue()
    return comm.save(name, variable.asnumpy())


def request_variable(target: int, name: str) -> Tensor | None:
    """What rank `target` has saved latest under `name`; None where it has saved nothing yet, or has ended. That worker
    is neither stopped nor asked: `ms_kungfu.comm.request`, which has the version, too."""
    saved = comm.request(target, name)
    return None if saved is None else Tensor(saved.value)
