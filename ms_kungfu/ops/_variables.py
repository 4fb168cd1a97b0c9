"""Save single tensors to the model store, and request them, outside of a graph."""

from __future__ import annotations

from mindspore import Tensor

from ms_kungfu import comm
from ms_kungfu.ops._sync import wait_for_queue


def save_variable(variable: Tensor, name: str | None = None) -> int:
    """Save a copy of a parameter or tensor, which other workers can request with `request_variable`.

    This call doesn't wait for other workers; see `ms_kungfu.comm.save`.

    Args:
        variable: the parameter or tensor to save, of any shape.
        name: the name to save under; by default the parameter's own name.

    Returns:
        The version, which is the number of times that this process has saved under the name.

    Raises:
        ValueError: if the tensor has no name, or for the reasons that `ms_kungfu.comm.save` lists.
    """
    name = name or getattr(variable, "name", None)
    if not name:
        raise ValueError("a tensor that isn't a parameter has no name; give name=")
    wait_for_queue()
    return comm.save(name, variable.asnumpy())


def request_variable(target: int, name: str) -> Tensor | None:
    """Return the tensor that a rank has most recently saved under a name.

    The call doesn't interrupt the other worker. `ms_kungfu.comm.request` does the same and also
    returns the version of the saved tensor.

    Args:
        target: the rank that saved the tensor.
        name: the name under which it was saved.

    Returns:
        A tensor, or None if the rank has saved nothing yet or has ended.
    """
    saved = comm.request(target, name)
    return None if saved is None else Tensor(saved.value)
