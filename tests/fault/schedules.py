"""Random courses of events for `simulator.world.World`, and how one that breaks a promise becomes a short story."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ms_kungfu.launcher.state.policy import Recover
from tests.fault.simulator.events import OUTAGES
from tests.fault.simulator.hosts_world import HOST_TIMEOUT_S, HostsSetup, HostsWorld
from tests.fault.simulator.setting import COLLECTIVE_TIMEOUT_S, MAX_WORKERS, Happening, Setup, Violation
from tests.fault.simulator.world import World

_KINDS = {
    "kill member": 8,
    "kill newcomer": 3,
    "kill several": 2,
    "kill all": 0.2,
    "resize": 4,
    "evict": 1,
    "policy evicts": 1,
    "terminate": 1,
    "stop": 0.7,
    "pause": 0.7,
    "slow": 1,
    "server away": 2,
    "server loses all": 1,
}
# Where a worker waits, and may die, from a step's first shard to the next one's, and what a change adds.
PLACES_IN_A_STEP = (
    "reads a batch",
    "before its word in kungfu/shards/new",
    "before its word in kungfu/shards/hashes",
    "after its word in kungfu/shards/hashes",
    "in a leaf",
    "when a shard is added",
    "between two shards",
    "before its word in shards/0",
    "after its word in shards/0",
    "before the next generation",
    "between the sums of a step",
    "before its word in shards/1",
    "after its word in shards/1",
    "after the sum",
    "before its word in kungfu/shards/pace",
    "after its word in kungfu/shards/pace",
    "before its word in program/stop",
    "before the record",
    "before its word in kungfu/step",
    "after its word in kungfu/step",
    "asks",
    "is answered",
    "joining",
    "joined",
    "before its word in kungfu/state/root",
)


@dataclass(frozen=True)
class Schedule:
    """What a seed stands for."""

    seed: int
    setup: Setup
    happenings: tuple[Happening, ...]


def schedule_of(seed: int) -> Schedule:
    rng = random.Random(f"schedule {seed}")
    external = rng.random() < 0.4
    setup = Setup(
        size=rng.choice((1, 2, 2, 3, 3, 4)),
        recover=rng.choice((Recover.SHRINK, Recover.REPLACE, Recover.REPLACE)),
        standbys=rng.choice((0, 0, 0, 1, 2)),
        external=external,
        max_restarts=rng.choice((10, 10, 1)),
        schedule=tuple((rng.randrange(12), rng.randint(1, 4)) for _ in range(rng.choice((0, 0, 0, 1, 2)))),
        wait=rng.random() < 0.3,
        samples=rng.choice((12, 17, 24)),
        global_batch=rng.choice((3, 6, 8)),
        prepare_s=rng.choice((0.0, 0.1, 0.5)),
        groups=rng.choice((("grad",), ("grad/0", "grad/1"))),
    )
    if setup.size > 1 and rng.random() < 0.1:
        # A schedule that goes below the smallest size is an error of the program's.
        setup = replace(setup, min_size=2, schedule=())
    kinds = [kind for kind in _KINDS if external or kind not in OUTAGES]
    weights = [_KINDS[kind] for kind in kinds]
    happenings: list[Happening] = []
    when = 0.0
    for kind in rng.choices(kinds, weights, k=rng.choice((1, 2, 2, 3, 3, 4, 5, 6))):
        # Often close together: what is interesting is one thing in the middle of another.
        when += rng.expovariate(1 / rng.choice((0.01, 0.1, 0.4)))
        who = rng.randrange(8)
        if kind == "kill several":
            for _ in range(rng.randint(2, 3)):
                happenings.append(Happening(round(when, 4), "kill member", rng.randrange(8)))
                when += rng.choice((0.0, 0.002, 0.02))
            continue
        more = {"slow": 1.0, "pause": rng.uniform(0.05, 0.8), "policy evicts": float(rng.randrange(4))}.get(kind, 0.0)
        if kind in OUTAGES:
            more = rng.uniform(0.05, 1.5)
        if kind == "resize":
            who = rng.randint(1, 4)
        happenings.append(Happening(round(when, 4), kind, who, round(more, 4)))
    # Drawn last, so that the other ones stay as they were.
    if rng.random() < 0.3:
        setup = replace(setup, asynchronous=True, wait=False)
    if rng.random() < 0.4:
        setup, happenings = _wishes_and_deaths(rng, setup)
    elif rng.random() < 0.05:
        happenings = sorted([*happenings, _freeze(rng, rng.uniform(0.1, 1.0))], key=lambda h: h.at)
    if rng.random() < 0.3:
        setup = replace(setup, checkpoint_every=rng.choice((3, 12)))
    if not setup.asynchronous and rng.random() < 0.5:
        setup, happenings = _shards(rng, setup, happenings)
    elif not setup.asynchronous and rng.random() < 0.3:
        setup = replace(setup, reductions=rng.choice((2, 3)))
    if not setup.asynchronous and rng.random() < 0.4:
        setup = replace(setup, epochs_a_call=rng.choice((1, 2)))
    if setup.shards is not None or setup.reductions > 1:  # steps take longer, so there are fewer before the end
        setup = replace(setup, schedule=tuple((step // 3, size) for step, size in setup.schedule))
    if rng.random() < 0.25 and setup.step_s < 0.1 and setup.min_size == 1:  # a joining worker has time to start ahead
        entries = (rng.randrange(4, 8), rng.randint(2, 4)), (rng.randrange(8, 12), rng.randint(1, 4))
        setup = replace(setup, schedule=entries, prepare_s=0.1)
    if rng.random() < 0.1:
        setup = replace(setup, processes=rng.choice((3, 4, 5)))
    if setup.external and rng.random() < 0.2:
        back = Happening(round(rng.uniform(0.2, 2.0), 4), "server is as at first", 0, round(rng.uniform(0.05, 1.5), 4))
        happenings = sorted([*happenings, back], key=lambda happening: happening.at)
    # With shards the bits would depend on when it comes true.
    if not (setup.asynchronous or setup.schedule or setup.shards) and setup.min_size == 1 and rng.random() < 0.3:
        setup = replace(setup, grown=tuple((rng.randrange(8), rng.randint(1, 4)) for _ in range(rng.choice((1, 1, 2)))))
    return Schedule(seed, setup, tuple(happenings))


def _shards(rng: random.Random, setup: Setup, happenings: list[Happening]) -> tuple[Setup, list[Happening]]:
    """A step is a deal of shards, and workers die in it."""
    shards = rng.choice((1, 2, 3, 4, 5, 6, 8, 8))
    setup = replace(
        setup, shards=shards, global_batch=shards * rng.choice((1, 2, 3)), samples=rng.randint(6, 40),
        sums=rng.choice((1, 1, 2)), uneven=rng.random() < 0.3, seed=rng.randrange(3),
    )  # fmt: skip
    setup = replace(setup, drop_remainder=setup.samples >= setup.global_batch and rng.random() < 0.2)
    happenings = list(happenings)
    when = rng.uniform(0.1, 1.0)
    for _ in range(rng.choice((0, 1, 1, 2, 3, 4))):
        kind = "kill at" if rng.random() < 0.9 else "stop at"
        place, times = rng.choice(PLACES_IN_A_STEP), float(rng.choice((0, 0, 0, 1, 2, 5)))
        happenings.append(Happening(round(when, 4), kind, rng.randrange(12), times, place))
        when += rng.choice((0.0, 0.0, 0.02, 0.3))
    return setup, sorted(happenings, key=lambda happening: happening.at)


def _wishes_and_deaths(rng: random.Random, setup: Setup) -> tuple[Setup, list[Happening]]:
    """Steps so slow that several wishes are outstanding, and deaths among the workers that would carry them out."""
    setup = replace(
        setup, step_s=rng.choice((0.03, 0.3, 0.6)), prepare_s=rng.choice((0.1, 0.5, 1.0)), schedule=(), min_size=1
    )
    happenings: list[Happening] = []
    when = rng.uniform(0.0, 1.0)
    for _ in range(rng.choice((1, 1, 2, 3))):
        for _ in range(rng.choice((1, 2, 2, 3, 4))):
            size = MAX_WORKERS + 1 if rng.random() < 0.02 else rng.randint(1, 5)
            happenings.append(Happening(round(when, 4), "resize", size))
            when += rng.choice((0.0, 0.01, 0.05, 0.2))
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            kind = rng.choices(("kill lone", "kill newcomer", "kill member", "evict"), (4, 4, 3, 0.5))[0]
            when += rng.choice((0.0, 0.01, 0.05, 0.2, 0.5))
            happenings.append(Happening(round(when, 4), kind, rng.randrange(7)))
        if rng.random() < 0.1:
            happenings.append(Happening(round(when, 4), "no descriptors", 0, round(rng.uniform(0.05, 1.0), 4)))
        if rng.random() < 0.05:
            happenings.append(_freeze(rng, when))
        when += rng.expovariate(1 / rng.choice((0.1, 0.5)))
    if rng.random() < 0.1:
        happenings.append(Happening(0.1, "no descriptors", 0, round(rng.uniform(0.2, 2.0), 4)))
    return setup, sorted(happenings, key=lambda happening: happening.at)


def _freeze(rng: random.Random, when: float) -> Happening:
    """For a moment, for longer than any process waits, or for ever (0)."""
    return Happening(round(when, 4), "freeze", rng.randrange(8), rng.choice((0.0, 0.5, 8.0, 25.0)))


_KINDS_OF_HOSTS = {
    "kill launcher": 2,
    "switch off": 1,
    "pause host": 2,
    "cut": 3,
    "isolate": 1,
    "reset": 3,
    "host leaves": 1.5,
    "host joins": 2,
    "interrupt": 0.2,
    "kill head": 0.2,
    "kill member": 4,
    "kill newcomer": 1,
    "kill several": 2,
    "resize": 4,
    "evict": 0.7,
    "terminate": 0.7,
    "server away": 1,
    "pause all": 0.5,
}


def schedule_of_hosts(seed: int) -> Schedule:
    """A job over several hosts, to which and between which things happen."""
    rng = random.Random(f"schedule of hosts {seed}")
    hosts = rng.choice((2, 2, 3, 3, 3, 4))
    setup = HostsSetup(
        hosts=hosts,
        size=rng.randint(hosts, 2 * hosts),
        recover=rng.choice((Recover.SHRINK, Recover.REPLACE)),
        external=rng.random() < 0.3,
        samples=rng.choice((12, 24)),
        prepare_s=rng.choice((0.0, 0.1, 0.5)),
        groups=rng.choice((("grad",), ("grad/0", "grad/1"))),
        step_s=rng.choice((0.03, 0.03, 0.1, 0.3)),
    )
    kinds = [kind for kind in _KINDS_OF_HOSTS if setup.external or kind not in OUTAGES]
    happenings: list[Happening] = []
    when = rng.choice((0.0, 0.3, 0.6)) * rng.random()
    for kind in rng.choices(kinds, [_KINDS_OF_HOSTS[kind] for kind in kinds], k=rng.choice((1, 1, 2, 2, 3, 3, 4, 5))):
        when += rng.expovariate(1 / rng.choice((0.01, 0.1, 0.5, 1.5)))
        who = rng.randrange(12)
        if kind == "kill several":  # on several hosts at once
            for _ in range(rng.randint(2, 3)):
                happenings.append(Happening(round(when, 4), "kill member", rng.randrange(8)))
                when += rng.choice((0.0, 0.002, 0.02))
            continue
        more, place = 0.0, ""
        if kind in ("cut", "isolate", "pause host", "pause all"):
            more = HOST_TIMEOUT_S * rng.choice((0.05, 0.3, 0.8, 1.0, 1.5, 3.0)) * rng.uniform(0.8, 1.2)
        if kind == "switch off":
            more = rng.uniform(1.0, 8.0)
        if kind == "cut":
            place = rng.choice(("one way", "both ways"))
        if kind == "reset":
            more, place = float(rng.choice((0, 0, 1, 2, 3, 5, 8, 13, 21))), rng.choice(("control", "control", "link"))
        if kind == "resize":
            who = rng.randint(1, 2 * hosts)
        if kind in OUTAGES:
            more = rng.uniform(0.05, 3.0)
        happenings.append(Happening(round(when, 4), kind, who, round(more, 4), place))
    if rng.random() < 0.5:  # drawn last, so that the other ones stay as they were
        setup = replace(setup, standbys=rng.choice((0, 1, 1, 2, 3)), processes=rng.choice((float("inf"), 3, 5)))
        if rng.random() < 0.5:  # sizes for which one host alone has the slots
            entries = (rng.randrange(4, 8), rng.randint(2, 4)), (rng.randrange(8, 12), rng.randint(1, 4))
            setup = replace(setup, size=rng.randint(1, 3), slots=4, schedule=entries, prepare_s=0.1)
    return Schedule(seed, setup, tuple(happenings))


_KINDS_OF_LEADERSHIP = {
    "kill head": 8, "pause head": 3, "head leaves": 3, "lose store": 2, "fill store": 2, "server away": 2,
}  # fmt: skip


def schedule_of_leadership(seed: int) -> Schedule:
    """The same in a job whose controller's seat is in the store, and mostly to its controller."""
    rng = random.Random(f"schedule of seats {seed}")
    schedule = schedule_of_hosts(seed)
    happenings = [h for h in schedule.happenings if rng.random() < 0.5]
    when = 0.3 + rng.random()
    for kind in rng.choices(
        list(_KINDS_OF_LEADERSHIP), list(_KINDS_OF_LEADERSHIP.values()), k=rng.choice((1, 1, 1, 2, 3))
    ):
        when += rng.choice((0.0, 0.01, 0.1, 0.5, 3.0)) * rng.random()
        more = 0.0 if kind in ("kill head", "head leaves") else HOST_TIMEOUT_S * rng.choice((0.1, 0.5, 1.0, 1.5, 3.0))
        happenings.append(Happening(round(when, 4), kind, rng.randrange(12), round(more, 4)))
    setup = replace(schedule.setup, moves=True)
    happenings.sort(key=lambda happening: happening.at)
    happenings += [*_after_the_lease(seed), *_long_outage(seed)]
    if any(happening.kind == "fill store" for happening in happenings):  # which refuses a size of the program's
        setup = replace(setup, schedule=())
    return Schedule(seed, setup, tuple(happenings))


def _long_outage(seed: int) -> Iterator[Happening]:
    """The store is away, or full, for longer than workers wait for each other, while hosts die and sizes change."""
    rng = random.Random(f"long outage {seed}")
    if rng.random() < 0.96:
        return
    begin = round(0.5 + 2.0 * rng.random(), 4)
    kind = rng.choice(("server away", "server away", "fill store"))
    yield Happening(begin, kind, 0, round(COLLECTIVE_TIMEOUT_S * rng.uniform(1.2, 2.0), 4))
    struck = ("kill launcher", "kill head", "switch off", "resize", "kill member")
    for kind in rng.choices(struck, k=rng.choice((1, 1, 2))):
        later, more = round(begin + rng.choice((-0.1, 0.01, 1.0)) * rng.random(), 4), 3.0 * (kind == "switch off")
        yield Happening(later, kind, rng.randint(1, 6), more)


def _after_the_lease(seed: int) -> Iterator[Happening]:
    """To the new controller, for which the others look."""
    rng = random.Random(f"behind the seat {seed}")
    if rng.random() < 0.2:  # to the host that reports to the next controller what it has
        kind = rng.choice(("kill reporter", "kill reporter's worker", "kill reporter's guard"))
        yield Happening(0.0, kind, rng.randrange(6), round(0.1 * rng.random() ** 2, 4))
    if rng.random() < 0.2:  # while no host has the lease, or one has just taken it
        kind = rng.choice(("host leaves", "interrupt", "kill launcher", "kill member", "resize"))
        yield Happening(round(rng.random(), 4), kind, rng.randrange(1, 6), term=rng.choice((1, 2)))
    if rng.random() < 0.4:
        kind = rng.choice(("kill head", "pause head", "pause head", "pause all", "server away", "fill store"))
        more = 0.0 if kind == "kill head" else HOST_TIMEOUT_S * rng.choice((0.5, 0.95, 1.1, 1.5, 3.0))
        yield Happening(round(0.3 * rng.random(), 4), kind, 0, more, term=2)


def broken_in(batch: int, batches: int, seeds: range, schedule_of_seed: Callable[[int], Schedule]) -> str | None:
    """Of `seeds` in so many batches: tells of the first of this batch that breaks a promise."""
    for seed in seeds[batch::batches]:
        schedule = schedule_of_seed(seed)
        violation = violation_of(schedule)
        if violation is not None:
            return f"seed {seed}: {violation}\n\nshrunk:\n{story(shrunk(schedule))}"
    return None


def variations(
    setup: HostsSetup, happenings: tuple[Happening, ...], seeds: int, later_s: float, first: int = 0
) -> Iterator[Schedule]:
    """With other delays, and each happening up to `later_s` later."""
    for seed in range(first, first + seeds):
        rng = random.Random(seed)
        moved = [replace(h, at=round(h.at + rng.uniform(0, later_s), 4)) for h in happenings]
        yield Schedule(seed, setup, tuple(sorted(moved, key=lambda h: h.at)))


def run(schedule: Schedule, told: list[str] | None = None):
    """The outcome; Violation where a promise is broken."""
    if isinstance(schedule.setup, HostsSetup):
        return HostsWorld(schedule.seed, schedule.setup, schedule.happenings, told).run()
    return World(schedule.seed, schedule.setup, schedule.happenings, told).run()


def violation_of(schedule: Schedule) -> Violation | None:
    try:
        run(schedule)
    except Violation as violation:
        return violation
    return None


def first_violation(schedules: Iterable[Schedule], most_events: int = 3) -> str:
    """Tells of the first that breaks a promise, and can be told in so many events. AssertionError where none does."""
    tried = 0
    for tried, schedule in enumerate(schedules, 1):
        violation = violation_of(schedule)
        if violation is not None and len((short := shrunk(schedule)).happenings) <= most_events:
            first = str(violation).splitlines()[0]
            assert "TypeError" not in first, f"it is what breaks it that is wrong: {first}"
            return f"found by schedule {tried}, told in {len(short.happenings)} events: {first}"
    raise AssertionError(f"nothing was found in {tried} schedules")


def shrunk(schedule: Schedule) -> Schedule:
    """A schedule with as few events, and as plain a job, as still break a promise (Zeller's delta debugging, 2002)."""
    events = list(schedule.happenings)
    pieces = 2
    while len(events) > 1:
        size = -(-len(events) // pieces)
        for begin in range(0, len(events), size):
            rest = events[:begin] + events[begin + size :]
            if violation_of(replace(schedule, happenings=tuple(rest))) is not None:
                events, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(events))
    schedule = replace(schedule, happenings=tuple(events))
    plain = type(schedule.setup)()
    names = ("schedule", "wait", "standbys", "external", "min_size", "max_restarts", "groups", "prepare_s", "step_s",
             "checkpoint_every", "sums", "uneven", "drop_remainder", "reductions", "epochs_a_call",
             "processes")  # fmt: skip
    for name in names:
        simpler = replace(schedule, setup=replace(schedule.setup, **{name: getattr(plain, name)}))
        if simpler != schedule and violation_of(simpler) is not None:
            schedule = simpler
    return schedule


def story(schedule: Schedule) -> str:
    """What happens in it, for people."""
    told: list[str] = []
    try:
        run(schedule, told)
        end = "no promise is broken"
    except Violation as violation:
        end = f"BROKEN: {violation}"
    events = "\n".join(f"  {happening}" for happening in schedule.happenings) or "  (nothing)"
    return f"{schedule.setup}\nevents:\n{events}\n" + "\n".join(told[-80:]) + f"\n{end}"
