"""`all_reduce`, `broadcast` and `gradients`: collectives over tensors of given sizes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks import contenders, machine, report, rounds
from benchmarks.group import Group, running
from benchmarks.workload import DTYPES, Task
from ms_kungfu.fusion.mode import NONE, Mode
from ms_kungfu.fusion.plan import Gradient, make_plan
from ms_kungfu.fusion.shapes import GRADIENTS

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Settings:
    """The settings of all collectives."""

    contenders: Sequence[str]
    ranks: int
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    rounds: int = 5
    samples: int | None = None  # in each round; None: depends on the size
    fresh_from: int = _MIB
    timeout: float = 300.0  # seconds, for each answer


def _groups(counts: Sequence[int], unit: int, way: str) -> tuple[tuple[int, int], ...]:
    """Return the groups of tensors [begin, end), one for each call if `way` is used (:attr:`Contender.ways`)."""
    if way == "flat":
        return ((0, len(counts)),)
    mode = NONE if way == "each" else Mode("size", int(way[:-1]))
    plan = make_plan([Gradient("", count * unit, "") for count in counts], mode)
    return tuple(run for runs in plan.runs() for run in runs)


def _task(kind: str, counts: Sequence[int], way: str, settings: Settings) -> Task:
    unit = DTYPES[settings.dtype].unit
    nbytes = max(1, sum(counts) * unit)
    groups = _groups(counts, unit, way)
    # Below 256 KiB, a call is so short that reading the clock would matter. In a real program, too, such a tensor stays
    # in the cache.
    batch = min(100, max(1, 256 * _KIB // nbytes)) if len(counts) == 1 else 1
    samples = settings.samples or min(50, max(7, 256 * _MIB // (nbytes * batch)))
    sets = 1
    if nbytes >= settings.fresh_from:
        # The inputs and outputs of all sets are twice the cache. The warm-up uses each set once.
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
            entries.append(rounds.Entry(label, group, task, about))
    done = rounds.run(entries, settings.rounds)
    base = next((e for e in done if e.group.name.startswith("kungfu")), None)
    return report.records(bench, done, base)


def _running(settings: Settings) -> AbstractContextManager[dict[str, Group]]:
    kinds = {name: contenders.find(name) for name in settings.contenders}
    return running(kinds, settings.ranks, settings.timeout)


def by_size(bench: str, sizes: Sequence[int], settings: Settings, out: report.Report) -> None:
    """Measure `all_reduce` or `broadcast` of one tensor of each size (bytes, rounded to whole elements)."""
    unit = DTYPES[settings.dtype].unit
    what = f"{bench}, {settings.dtype}" + (f" {settings.op}" if bench == "all_reduce" else "")
    with _running(settings) as groups:
        for nbytes in sizes:
            count = max(1, nbytes // unit)
            title = f"{what}, {settings.ranks} ranks, {report.size_text(count * unit)}"
            out.add(title, _measure(bench, bench, None, [count], groups, settings))


def gradients(models: Sequence[str], settings: Settings, out: report.Report) -> None:
    """Measure an all-reduce of a model's gradients, once for each way of grouping that a baseline supports."""
    with _running(settings) as groups:
        for model in models:
            counts = GRADIENTS[model]
            size = report.size_text(sum(counts) * DTYPES[settings.dtype].unit)
            title = f"gradients of {model} ({len(counts)} tensors, {size}), {settings.dtype}, {settings.ranks} ranks"
            out.add(title, _measure("gradients", "all_reduce", model, counts, groups, settings))
