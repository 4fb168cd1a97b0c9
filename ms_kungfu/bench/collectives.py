"""`all_reduce`, `broadcast` and `gradients`: collectives over tensors of given sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ms_kungfu.bench import contenders, machine, report, rounds
from ms_kungfu.bench.group import Group
from ms_kungfu.bench.workload import DTYPES, Task, bucketed
from ms_kungfu.fusion.shapes import GRADIENTS

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Settings:
    """What is asked for, whatever the collective."""

    contenders: Sequence[str]
    ranks: int
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    rounds: int = 5
    samples: int | None = None  # in each round; None: by size
    fresh_from: int = _MIB
    timeout_s: float = 300.0


@contextmanager
def groups_of(names: Sequence[str], ranks: int, timeout_s: float) -> Iterator[dict[str, Group]]:
    """All contenders, started and waiting. They start side by side, since importing a framework takes seconds."""
    with ExitStack() as stack:
        started = {name: stack.enter_context(Group(name, contenders.find(name), ranks, timeout_s)) for name in names}
        for group in started.values():
            group.wait_ready()
        yield started


def _task(kind: str, counts: Sequence[int], way: str, settings: Settings) -> Task:
    unit = DTYPES[settings.dtype].unit
    nbytes = max(1, sum(counts) * unit)
    if way == "each":
        groups = tuple((i, i + 1) for i in range(len(counts)))
    else:
        limit = nbytes if way == "flat" else int(way[:-1]) * _MIB
        groups = bucketed(counts, unit, limit)
    # Smaller ones are so short that reading the clock would show, and stay in the cache in a program, too.
    batch = min(100, max(1, 256 * _KIB // nbytes)) if len(counts) == 1 else 1
    samples = settings.samples or min(50, max(7, 256 * _MIB // (nbytes * batch)))
    sets = 1
    if nbytes >= settings.fresh_from:
        # Inputs and outputs of one turn through the sets, which the warm-up takes, are twice the cache.
        sets = -(-machine.cache_bytes() // nbytes)
    root = settings.root if kind == "broadcast" else 0
    return Task(kind, tuple(counts), groups, settings.dtype, settings.op, root, sets, samples, batch)


def _measure(
    bench: str, kind: str, model: str | None, counts: Sequence[int], groups: dict[str, Group], settings: Settings
) -> list[report.Record]:
    entries = []
    for name, group in groups.items():
        ways = group.contender.ways if len(counts) > 1 else ("each",)
        for way in ways:
            task = _task(kind, counts, way, settings)
            about = {
                "model": model,
                "way": way if len(counts) > 1 else None,
                "dtype": task.dtype,
                "op": task.op if kind == "all_reduce" else None,
                "bytes": task.nbytes,
                "tensors": len(counts),
                "batch": task.batch,
                "buffers": task.sets,
            }
            label = f"{name}, {way}" if len(ways) > 1 else name
            entries.append(rounds.Entry(label, group, task.to_json(), about))
    done = rounds.run(entries, settings.rounds)
    base = next((e for e in done if e.group.name.startswith("kungfu")), None)
    return report.records(bench, done, base)


def by_size(bench: str, sizes: Sequence[int], settings: Settings, out: report.Report) -> None:
    """`all_reduce` or `broadcast` of one tensor of each size (bytes, rounded to whole elements)."""
    unit = DTYPES[settings.dtype].unit
    what = f"{bench}, {settings.dtype}" + (f" {settings.op}" if bench == "all_reduce" else "")
    with groups_of(settings.contenders, settings.ranks, settings.timeout_s) as groups:
        for nbytes in sizes:
            count = max(1, nbytes // unit)
            title = f"{what}, {settings.ranks} ranks, {report.size_text(count * unit)}"
            out.add(title, _measure(bench, bench, None, [count], groups, settings))


def gradients(models: Sequence[str], settings: Settings, out: report.Report) -> None:
    """An all-reduce of a model's gradients, in each of the ways that a contender has for it."""
    with groups_of(settings.contenders, settings.ranks, settings.timeout_s) as groups:
        for model in models:
            counts = GRADIENTS[model]
            size = report.size_text(sum(counts) * DTYPES[settings.dtype].unit)
            title = f"gradients of {model} ({len(counts)} tensors, {size}), {settings.dtype}, {settings.ranks} ranks"
            out.add(title, _measure("gradients", "all_reduce", model, counts, groups, settings))
