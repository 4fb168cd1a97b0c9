"""The broadcast primitive."""

from __future__ import annotations

from ms_kungfu.ops._base import Collective, check_root


class KungFuBroadcast(Collective):
    """Copy the tensors of rank `root` to every rank.

    The input is a tensor or a tuple of tensors. The output is new tensors; the input isn't changed.
    Every dtype that a Parameter can have is supported, including bool and complex. The shapes must be
    the same at all ranks. The gradient is passed on unchanged, as in MindSpore's Broadcast.

    Args:
        root: the rank whose tensors are sent.
        name: matches the call with those of the other ranks. Calls without a name are matched by their
            order.

    Raises:
        RuntimeError: at every rank, if `root` isn't a rank of the cluster at the time of the call.
    """

    copies = True

    def __init__(self, root: int = 0, name: str | None = None) -> None:
        super().__init__("KungFuBroadcast", name, root=check_root(root))
