"""The answers of ``mindspore.communication``: the virtual world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NoReturn

from ms_kungfu.msrun import world

WORLD_GROUPS = ("hccl_world_group", "nccl_world_group", "mccl_world_group")
_groups: set[str] = set()  # groups of all ranks that the program has made
_BACKENDS = ("hccl", "nccl", "mccl", None)


def refused(what: str, why: str) -> RuntimeError:
    """Return the error for what has no counterpart in a virtual world."""
    return RuntimeError(f"{what} isn't supported under kungfu-run --msrun: {why}")


def check_group(group: Any) -> None:
    """Raise if it isn't a group of all ranks."""
    if group is None or group in WORLD_GROUPS or group in _groups:
        return
    if not isinstance(group, str):
        raise TypeError(f"a group is a name, a text, not {group!r}")
    raise refused(f"group {group!r}", "there is one group, of all ranks; create_group has made no other of this name")


def init(backend_name: str | None = None) -> None:
    """Act as MindSpore's, without starting anything."""
    if backend_name not in _BACKENDS:
        raise RuntimeError(f"there is no backend {backend_name!r} for init(); leave the argument out")
    world.begin()


def release() -> None:
    """Make the program one process from now on."""
    _groups.clear()
    world.end()


def get_rank(group: str | None = None) -> int:
    """Return the virtual rank, which the worker keeps."""
    check_group(group)
    return world.rank() if world.begun() else 0


def get_group_size(group: str | None = None) -> int:
    """Return V, whatever the cluster's size is."""
    check_group(group)
    return world.size() if world.begun() else 1


def get_world_rank_from_group_rank(group: str, group_rank_id: int) -> int:
    return _of_everybody(group, group_rank_id)


def get_group_rank_from_world_rank(world_rank_id: int, group: str) -> int:
    return _of_everybody(group, world_rank_id)


def _of_everybody(group: str, rank: int) -> int:
    check_group(group)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"a rank is a number, not {rank!r}")
    if not 0 <= rank < get_group_size():
        raise ValueError(f"rank {rank} is none of the {get_group_size()} of --msrun-size")
    return rank


def create_group(group: str, rank_ids: Sequence[int], options: Any = None) -> None:
    """Make a group of all ranks; others are rejected."""
    del options  # of a backend that doesn't exist here
    if sorted(rank_ids) != list(range(get_group_size())):
        raise refused(
            f"create_group({group!r}, {list(rank_ids)})",
            "workers stand for all ranks and may change, so there are no groups of some; this is data parallelism",
        )
    _groups.add(group)


def destroy_group(group: str) -> None:
    if group not in _groups:
        raise refused(f"destroy_group({group!r})", "the program has made no group of this name")
    _groups.discard(group)


def get_process_group_ranks(group: str | None = None) -> list[int]:
    check_group(group)
    return list(range(get_group_size()))


def get_comm_name(group: str | None = None) -> NoReturn:
    raise refused("get_comm_name", "there is no communicator of HCCL's")


def refusing(name: str, why: str) -> Callable[..., NoReturn]:
    """Return a function of this name that raises why it isn't available."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise refused(name, why)

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def of_process_groups(module: str, name: str) -> Callable[..., Any]:
    """Return the answers of ``mindspore.mint.distributed`` and ``mindspore.ops.communication``: rank and size only."""
    answered: dict[str, Callable[..., Any]] = {
        "get_rank": get_rank,
        "get_world_size": get_group_size,
        "is_initialized": world.begun,
    }
    why = "of its functions there are get_rank, get_world_size and is_initialized; mindspore.communication is answered"
    return answered.get(name) or refusing(f"{module.removeprefix('mindspore.')}.{name}", why)
