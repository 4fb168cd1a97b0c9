"""The model store for single tensors, outside of a graph."""

from __future__ import annotations

from mindspore import Tensor

from ms_kungfu import comm
from ms_kungfu.ops._sync import wait_for_queue


def save_variable(variable: Tensor, name: str | None = None) -> int:
    """Keep a copy of a parameter or tensor for the other workers to `request_variable`.

    It waits for no other worker; see `ms_kungfu.comm.save`.

    Args:
        variable: what to keep, of any shape.
        name: under which; by default the parameter's own name.

    Returns:
        The version, which is how many times this process has saved under the name, from 1.

    Raises:
        ValueError: for a tensor without a name, and as in `ms_kungfu.comm.save`.
    """
    name = name or getattr(variable, "name", None)
    if not name:
        raise ValueError("a tensor that is no parameter has no name; give name=")
    wait_for_queue()
    return comm.save(name, variable.asnumpy())


def request_variable(target: int, name: str) -> Tensor | None:
    """Return what a rank has saved latest under a name.

    The other worker is neither stopped nor asked. `ms_kungfu.comm.request` does the same and returns
    the version, too.

    Args:
        target: the rank that has saved it.
        name: under which.

    Returns:
        A tensor, or None if the rank has saved nothing yet or has ended.
    """
    saved = comm.request(target, name)
    return None if saved is None else Tensor(saved.value)
