"""How many standbys a host starts, and when. Pure.

Whoever trains by a schedule tells ahead whom it wants next (`Expected`). They are started as standbys, so that an entry
that is waited for costs a hand-over, and not the start of Python, MindSpore and its compiler. What is told is a hint:
nothing waits for it, and lost, repeated or out of date it changes only how early somebody is started. It holds for the
cluster version in which it was told. Once another version is wanted nobody is started for it any more: who is there may
be needed for that one, and its members tell anew.

*Cores.* A start costs some seconds of a processor, which on a full machine training has to give. It gives them a few
at a time: standbys are started one after another where there are few cores, each when the one before is ready. Not with
a nice value: that spreads the same seconds over a longer time, in which the entry may come; beside workers that use
their cores wholly a nice standby may never get ready; and who isn't root can't take it back when the standby becomes
a worker (RLIMIT_NICE is 0).

*Memory.* A standby takes what a worker takes. It is started where there is room for two: a worker grows. One that is
starting hasn't taken its memory yet.
"""

from __future__ import annotations

from dataclasses import dataclass

_PART_OF_THE_CORES = 4


@dataclass(frozen=True)
class Expected:
    """Of the members of cluster `version`: that the next one has `size` workers, `newcomers` of whom are new."""

    version: int = -1
    newcomers: int = 0
    size: int = 0


@dataclass(frozen=True)
class Present:
    """The standbys that there are."""

    ready: int = 0
    starting: int = 0

    @property
    def count(self) -> int:
        return self.ready + self.starting


@dataclass(frozen=True)
class Room:
    """What the host has: cores, how many of them no worker uses (as far as is known), bytes of memory that are free,
    and bytes that a worker takes, 0 where that isn't known."""

    cores: int
    idle_cores: int
    free_bytes: float
    worker_bytes: float


@dataclass(frozen=True)
class Start:
    """So many standbys are started now, and `reason` is what is to be said of those who are expected; "": nothing."""

    count: int
    reason: str = ""
    lacks_memory: bool = False


def to_start(kept: int, expected: Expected, present: Present, room: Room) -> Start:
    """What to do about standbys.

    `kept` are always to be there (``-standby``), also for those who are expected: a standby is for whoever is needed.
    """
    first = max(0, kept - present.count)
    missing = expected.newcomers - present.count - first
    if missing <= 0:
        return Start(first)
    at_once = max(1, room.cores // _PART_OF_THE_CORES, room.idle_cores)
    may_start = max(0, at_once - present.starting - first)
    about_to_take = 1 + present.starting + first
    have_room = room.free_bytes / room.worker_bytes - about_to_take if room.worker_bytes else missing
    if may_start > 0 and have_room < 1:
        free, each = (int(number / 2**20) for number in (room.free_bytes, room.worker_bytes))
        reason = f"nobody is started ahead for want of memory: {free} MiB are free, and a worker takes {each}"
        return Start(first, reason, lacks_memory=True)
    reason = f"{expected.size} workers are wanted next: who is new is started ahead, {at_once} at a time"
    return Start(first + max(0, int(min(missing, have_room, may_start))), reason)
