"""The broadcast primitive."""

from __future__ import annotations

from ms_kungfu.ops._base import Collective, check_root


class KungFuBroadcast(Collective):
    """Copy the tensors of rank `root` to every rank.

    A call takes a tensor or a tuple of tensors and returns as many new ones; the input is left as it
    is. It takes every dtype that a Parameter can have, bool and complex too. The shapes must be the
    same at all ranks. The gradient is passed on as it is, as MindSpore's Broadcast does.

    Args:
        root: the rank whose tensors are sent.
        name: matches the call with those of the other ranks; calls without one are matched by their
            order.

    Raises:
        RuntimeError: at every rank, for a `root` that is outside the cluster when it is called.
    """

    copies = True

    def __init__(self, root: int = 0, name: str | None = None) -> None:
        super().__init__("KungFuBroadcast", name, root=check_root(root))
