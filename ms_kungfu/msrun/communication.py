"""Replace the functions of ``mindspore.communication``, so that they return the values of the virtual world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NoReturn

from ms_kungfu.msrun import world

WORLD_GROUPS = ("hccl_world_group", "nccl_world_group", "mccl_world_group")
_groups: set[str] = set()  # names of the groups that the program has created; each group contains all ranks
_BACKENDS = ("hccl", "nccl", "mccl", None)


def refused(what: str, why: str) -> RuntimeError:
    """Return the error for a feature that virtual worlds don't support."""
    return RuntimeError(f"{what} isn't supported under kungfu-run --msrun: {why}")


def check_group(group: Any) -> None:
    """Raise an error if `group` isn't a known group. Each known group contains all ranks."""
    if group is None or group in WORLD_GROUPS or group in _groups:
        return
    if not isinstance(group, str):
        raise TypeError(f"a group must be a name (a string), not {group!r}")
    raise refused(f"group {group!r}", "the program hasn't created a group with this name")


def init(backend_name: str | None = None) -> None:
    """Check the arguments like MindSpore's init(), without starting anything."""
    if backend_name not in _BACKENDS:
        raise RuntimeError(f"init() doesn't support backend {backend_name!r}; omit the argument")
    world.begin()


def release() -> None:
    """Make the functions of this module return the values for a single process from now on."""
    _groups.clear()
    world.end()


def get_rank(group: str | None = None) -> int:
    """Return this worker's virtual rank, which never changes; 0 if the program hasn't called `init`."""
    check_group(group)
    return world.rank() if world.begun() else 0


def get_group_size(group: str | None = None) -> int:
    """Return V, the number of virtual ranks, or 1 before the call of `init`.

    V doesn't depend on the number of workers.
    """
    check_group(group)
    return world.size() if world.begun() else 1


def get_world_rank_from_group_rank(group: str, group_rank_id: int) -> int:
    return _of_everybody(group, group_rank_id)


def get_group_rank_from_world_rank(world_rank_id: int, group: str) -> int:
    return _of_everybody(group, world_rank_id)


def _of_everybody(group: str, rank: int) -> int:
    check_group(group)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"a rank must be a number, not {rank!r}")
    if not 0 <= rank < get_group_size():
        raise ValueError(f"rank {rank} is out of range: -msrun-size sets {get_group_size()} ranks")
    return rank


def create_group(group: str, rank_ids: Sequence[int], options: Any = None) -> None:
    """Create a group of all ranks. Reject any other group."""
    del options  # options are for a backend, and there is no backend
    if sorted(rank_ids) != list(range(get_group_size())):
        raise refused(
            f"create_group({group!r}, {list(rank_ids)})",
            "a worker does the work of several ranks, and workers may change; only the group of all ranks is supported",
        )
    _groups.add(group)


def destroy_group(group: str) -> None:
    if group not in _groups:
        raise refused(f"destroy_group({group!r})", "the program hasn't created a group with this name")
    _groups.discard(group)


def get_process_group_ranks(group: str | None = None) -> list[int]:
    check_group(group)
    return list(range(get_group_size()))


def get_comm_name(group: str | None = None) -> NoReturn:
    raise refused("get_comm_name", "there is no HCCL communicator")


def refusing(name: str, why: str) -> Callable[..., NoReturn]:
    """Return a function with this name that raises an error. `why`: why the function isn't supported."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise refused(name, why)

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def of_process_groups(module: str, name: str) -> Callable[..., Any]:
    """Return the replacement for a function of ``mindspore.mint.distributed`` or ``mindspore.ops.communication``."""
    answered: dict[str, Callable[..., Any]] = {
        "get_rank": get_rank,
        "get_world_size": get_group_size,
        "is_initialized": world.begun,
    }
    why = "only get_rank, get_world_size and is_initialized are supported; use mindspore.communication"
    return answered.get(name) or refusing(f"{module.removeprefix('mindspore.')}.{name}", why)
