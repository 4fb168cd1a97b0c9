"""The broadcast primitive."""

from __future__ import annotations

from ms_kungfu.ops._base import Collective, check_root


class KungFuBroadcast(Collective):
    """Copy the tensors of rank `root` to every rank.

    The input is a tensor or a tuple of tensors, which isn't changed. The output has new tensors.
    Every dtype that a Parameter can have is supported, including bool and complex. The shapes must be
    the same on all ranks. The gradient is passed on unchanged, as in MindSpore's Broadcast.

    Args:
        root: the rank whose tensors are sent.
        name: the name that matches this rank's call with the other ranks' calls. Calls without a name
            are matched by their order.

    Raises:
        RuntimeError: if `root` isn't a rank of the cluster when the call runs. Every rank raises it.
    """

    copies = True

    def __init__(self, root: int = 0, name: str | None = None) -> None:
        super().__init__("KungFuBroadcast", name, root=check_root(root))
