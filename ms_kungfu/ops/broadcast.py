"""The broadcast primitive."""

from __future__ import annotations

from ms_kungfu.ops._base import Collective, check_root


class KungFuBroadcast(Collective):
    """Every rank gets rank `root`'s value.

    Takes a tensor or a tuple of tensors and returns as many, like :class:`KungFuAllReduce`, of every dtype that a
    Parameter can have, bool and complex too; the shapes must be the same at all ranks. A new tensor comes out, the
    input is left as it is. The gradient is passed on as it is, as MindSpore's Broadcast does. A `root` that is outside
    the cluster is a RuntimeError at every rank.
    """

    copies = True

    def __init__(self, root: int = 0, name: str | None = None) -> None:
        super().__init__("KungFuBroadcast", name, root=check_root(root))
