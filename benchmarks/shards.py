"""`shards`: measure the cost of training in shards, and its benefit if workers are slow, fail or join.

- cost: a step with as many shards as workers, compared with the same step without shards, in jobs that take turns
- table: the step time, and a worker's peak memory, by shards and workers
- straggler: the throughput with 16 shards, divided by the sum of the workers' speeds. Each of the four workers sleeps
  for each shard, and one of them three times as long
- kill: one worker of four is killed; grow: a schedule adds workers (1 -> 2 -> 4). Both measure the longest step on the
  remaining workers, and how many graphs they have compiled. kill-plain, grow-plain: the same without shards

Each part runs :mod:`.shards_worker` under kungfu-run, with one core per worker. The limits are the project's targets.
The benchmark reports a value above a limit, but fails only if a result is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Optional

from benchmarks import report
from benchmarks.job import Job, running_job
from benchmarks.pauses_worker import read_steps
from ms_kungfu.dataset import audit

PARTS = ("cost", "table", "straggler", "kill", "grow", "kill-plain", "grow-plain")
NETWORKS = ("lenet", "resnet", "transformer")
COST_LIMIT = 1.03
PACE_LIMIT = 0.85
_STEP_LIMIT_MS, _STEP_LIMIT_MEDIANS = 150.0, 12.0  # the larger limit counts
_WORKER = "benchmarks.shards_worker"
_BATCH = 32  # samples per step of all workers
_TURNS, _SAMPLES = 8, 40  # turns of a job that alternates with another one; steps per turn
_SHARDS = (None, 1, 2, 4, 8, 16, 32)  # of the table; None: without shards
_STRAGGLER = {"shards": 16, "adapt": 10, "steps": 30}
_SLEEP_S, _SLOW = 0.02, 3  # time to compute a shard, and how many times as long the slow worker takes
# As many samples as in examples/lenet-elastic. An epoch's last shard is shorter.
_LENET = {"do": "model_train", "batch": _BATCH, "total": 1500}
_LENET_SHARDS = 4
_EPOCH = -(-1500 // _BATCH)  # steps
_KILL_EPOCHS = 5
_GROW_EPOCHS, _GROW_AT = 75, ((800, 2), (2400, 4))  # late enough that joining workers have had time to start
Row = tuple[int, float, float, float]
Shards = Optional[int]


def _flags(shards: Shards = 1) -> list[str]:
    return [*([] if shards is None else ["-cores-per-worker", "1"]), "-recover", "shrink"]


def _result(ranks: int, plan: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Return the workers' results."""
    with running_job("shards", ranks, [_WORKER, "{folder}", json.dumps(plan)], _flags(), timeout) as job:
        job.finish()
        found: dict[str, Any] = json.loads((job.folder / "result.json").read_text())
        return found


def _record(part: str, contender: str, ranks: int, wrong: str | None, **columns: Any) -> report.Record:
    return {
        "bench": "shards", "part": part, "contender": contender, "ranks": ranks, **columns, **report.verdict(wrong)
    }  # fmt: skip


def _said(record: report.Record, text: str) -> str:
    return text + ("" if record["wrong"] is None else f"  WRONG: {record['wrong']}")


def _within(value: float, limit: float) -> str:
    return f"limit {limit:g}" + ("" if value <= limit else ", EXCEEDED")


# -- cost, table --


def ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the time of `ours` divided by the time of `theirs`: the median of the rounds' ratios.

    >>> ratio([[2.0, 2.0], [30.0, 30.0]], [[1.0, 1.0], [10.0, 10.0]])
    2.5
    """
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs))


def _in_turns(
    model: str, ranks: int, ways: Sequence[Shards], options: argparse.Namespace
) -> dict[Shards, tuple[list[list[float]], dict[str, Any]]]:
    """Return the step times of each variant by turn, and its workers' results at the end.

    Each variant is a separate job, because the second of two training runs in one process is always 3 to 10 % slower.
    The jobs exist together and take turns of a second or less, because a shared machine's speed changes by the minute.
    """
    plan = {
        "do": "time_steps", "model": model, "batch": _BATCH, "turns": _TURNS, "samples": options.samples or _SAMPLES
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        jobs = {}
        for way in ways:
            words = [_WORKER, "{folder}", json.dumps({**plan, "shards": way})]
            jobs[way] = stack.enter_context(running_job("shards", ranks, words, _flags(), options.timeout))
        for turn in range(_TURNS + 1):
            for job in jobs.values():
                job.take_turn(turn)
        found = {}
        for way, job in jobs.items():
            job.finish()
            found[way] = job.turns()[1:], json.loads((job.folder / "result.json").read_text())
        return found


def cost(options: argparse.Namespace, out: report.Report) -> None:
    for model, ranks in itertools.product(options.networks, options.ranks):
        times: dict[Shards, list[list[float]]] = {None: [], ranks: []}
        wrong = None
        for _ in range(options.rounds):
            found = _in_turns(model, ranks, list(times), options)
            for way, (turns, result) in found.items():
                times[way] += turns
                wrong = wrong or result["wrong"]
        today, ours = times[None], times[ranks]
        compared = ratio(ours, today)
        with_shards, without = (report.times([s for turn in way for s in turn]) for way in (ours, today))
        record = _record(
            "cost", f"{model}, {ranks} shards", ranks, wrong, model=model, shards=ranks, batch=_BATCH,
            rounds=options.rounds, **with_shards, without_p50_us=without["p50_us"], ratio=round(compared, 4),
            ratio_to="without shards", limit=COST_LIMIT,
        )  # fmt: skip
        out.records.append(record)
        text = (
            f"cost: {model}, {ranks} workers, {ranks} shards: a step of {report.time_text(with_shards['p50_us'])}, "
            f"without shards {report.time_text(without['p50_us'])}: {compared:.3f} ({_within(compared, COST_LIMIT)})"
        )
        print(_said(record, text), flush=True)


def grid(cells: Mapping[tuple[Shards, int], tuple[float, float]]) -> str:
    """Return a table of (ms per step, MiB) by shards and workers.

    >>> print(grid({(None, 1): (1.0, 500.0), (2, 1): (1.25, 510.0), (2, 2): (2.0, 520.0)}))
         shards            1 worker           2 workers
           none    1.00 ms, 500 MiB
              2    1.25 ms, 510 MiB    2.00 ms, 520 MiB
    """
    ranks = sorted({n for _, n in cells})
    lines = [" " * 5 + "shards" + "".join(f"{n} worker{'s' if n > 1 else ''}".rjust(20) for n in ranks)]
    for shards in dict.fromkeys(s for s, _ in cells):
        line = f"{'none' if shards is None else shards:>11}"
        for n in ranks:
            cell = cells.get((shards, n))
            line += (f"{cell[0]:.2f} ms, {cell[1]:.0f} MiB" if cell else "").rjust(20)
        lines.append(line.rstrip())
    return "\n".join(lines)


def table(options: argparse.Namespace, out: report.Report) -> None:
    for model in options.networks:
        cells = {}
        for ranks in sorted({1, *options.ranks}):
            for shards in (s for s in _SHARDS if s is None or s >= ranks):
                turns, found = _in_turns(model, ranks, [shards], options)[shards]
                columns = report.times([s for turn in turns for s in turn])
                cells[shards, ranks] = columns["p50_us"] / 1e3, found["peak_mib"]
                out.records.append(
                    _record(
                        "table",
                        f"{model}, {shards or 'no'} shards",
                        ranks,
                        found["wrong"],
                        model=model,
                        shards=shards,
                        batch=_BATCH,
                        peak_mib=round(found["peak_mib"], 1),
                        **columns,
                    )  # fmt: skip
                )
        print(f"table: {model}, {_BATCH} samples a step: the median step, and the most memory of a worker", flush=True)
        print(grid(cells), flush=True)


# -- straggler --


def efficiency(shards: int, step_s: float, shard_s: Iterable[float]) -> float:
    """Return the shards per second, divided by the number that the workers could compute without any waiting.

    >>> efficiency(16, 0.1, [0.02, 0.02, 0.02, 0.06])
    0.96
    """
    return round(shards / step_s / sum(1 / seconds for seconds in shard_s), 6)


def straggler(options: argparse.Namespace, out: report.Report) -> None:
    ranks = 4
    sleep_s = [_SLEEP_S * (_SLOW if rank == 1 else 1) for rank in range(ranks)]
    plan: dict[str, Any] = {"do": "straggle", **_STRAGGLER}
    found = _result(ranks, {**plan, "sleep_s": sleep_s}, options.timeout)
    alone = _result(1, {**plan, "sleep_s": [0.0]}, options.timeout)
    rows, wrong = found["rows"], found["wrong"]
    if wrong is None and rows[0]["digest"] != alone["rows"][0]["digest"]:
        wrong = f"the parameters are {rows[0]['digest']}, one worker's {alone['rows'][0]['digest']}"
    step_s = max(row["step_s"] for row in rows)
    idle = [rank for rank, row in enumerate(rows) if not row["shard_s"]]
    # A rank that computed no shards still has a speed.
    share = efficiency(plan["shards"], step_s, [row["shard_s"] or sleep_s[rank] for rank, row in enumerate(rows)])
    dealt = [row["dealt"] for row in rows]
    record = _record(
        "straggler", f"one of {ranks} is {_SLOW} times slower", ranks, wrong, shards=plan["shards"], dealt=dealt,
        step_ms=round(step_s * 1e3, 3), shard_ms=[row["shard_s"] and round(row["shard_s"] * 1e3, 3) for row in rows],
        share_of_speeds=round(share, 4), limit=PACE_LIMIT, idle=idle,
    )  # fmt: skip
    out.records.append(record)
    text = (
        f"straggler: one of {ranks} workers takes {_SLOW} times as long, {plan['shards']} shards: dealt "
        f"{'/'.join(map(str, dealt))}, a step of {step_s * 1e3:.1f} ms, {share:.3f} of the sum of the workers' speeds "
        f"(at least {PACE_LIMIT:g}{'' if share >= PACE_LIMIT else ', MISSED'})"
    )
    print(_said(record, text), flush=True)


# -- kill, grow --


@dataclass(frozen=True)
class Run:
    """Results of the workers that ran from a job's second epoch to its end."""

    median_ms: float
    longest_ms: float
    at_step: int
    compiled: int
    """Graphs after the first epoch."""
    compiled_before: int
    digest: str

    @property
    def medians(self) -> float:
        return self.longest_ms / self.median_ms

    @property
    def limit_ms(self) -> float:
        return max(_STEP_LIMIT_MS, _STEP_LIMIT_MEDIANS * self.median_ms)


def summary(
    steps: Mapping[int, Sequence[Row]], lines: Sequence[Mapping[str, Any]], stayed: Sequence[int], epoch: int
) -> Run:
    """Summarise the records of the workers that stayed until the job ended.

    Raise ValueError if the records aren't complete.

    Args:
        steps: for each process, its rows: step, begin, ..., end in seconds.
        lines: the lines that all processes wrote.
        stayed: the processes of the workers that stayed.
        epoch: the number of steps in an epoch; the summary leaves out the first epoch.
    """
    rows = [row for pid in stayed for row in steps[pid] if row[0] > epoch]
    ends = {pid: [line for line in lines if line["pid"] == pid and "digest" in line] for pid in stayed}
    if not rows or not all(ends.values()):
        raise ValueError("a worker that stayed has not come to the end")
    digests = {line["digest"] for each in ends.values() for line in each}
    if len(digests) != 1:
        raise ValueError(f"the parameters differ between workers: {sorted(digests)}")
    before = {pid: [line["compiled"] for line in lines if line["pid"] == pid and 0 <= line["step"] <= epoch][-1]
              for pid in stayed}  # fmt: skip
    if not all(before.values()):
        raise ValueError("nothing was compiled in the first epoch, as far as was counted")
    spent, number = max((end - begin, number) for number, begin, _, end in rows)
    return Run(
        statistics.median(end - begin for _, begin, _, end in rows) * 1e3, spent * 1e3, number,
        max(ends[pid][-1]["compiled"] - before[pid] for pid in stayed), max(before.values()), digests.pop(),
    )  # fmt: skip


def _finished(job: Job, stayed: Sequence[int]) -> Run:
    job.finish()
    found = audit.audit(*audit.read(job.folder / "ledger"))
    if not found.exact:
        raise ValueError(audit.to_text(found).splitlines()[-1])
    return summary(dict(read_steps(job.folder)), job.lines(), stayed, _EPOCH)


def _lenet(shards: Shards, epochs: int, schedule: str | None) -> list[str]:
    plan = {**_LENET, "shards": shards, "epochs": epochs, "schedule": schedule}
    return [_WORKER, "{folder}", json.dumps(plan)]


def _killed(shards: Shards, rng: random.Random, timeout: float) -> Run:
    """Kill one of four workers at a random moment of the second or third epoch."""
    with running_job("shards", 4, _lenet(shards, _KILL_EPOCHS, None), _flags(shards), timeout) as job:
        _, pids = job.whole(4)
        job.await_steps(pids, _EPOCH + 2 + rng.randrange(_EPOCH))
        time.sleep(rng.uniform(0.0, 0.05))
        victim = rng.choice(pids)
        os.kill(victim, signal.SIGKILL)
        return _finished(job, [pid for pid in pids if pid != victim])


def _undisturbed(shards: Shards, epochs: int, timeout: float) -> Run | None:
    """Return a run of one worker: every run with shards must have the same bits. Return None without shards."""
    if shards is None:
        return None
    with running_job("shards", 1, _lenet(shards, epochs, None), _flags(), timeout) as job:
        return _finished(job, job.whole(1)[1])


def _grown(shards: Shards, timeout: float) -> Run:
    schedule = ",".join(f"{step}:{size}" for step, size in _GROW_AT)
    with running_job("shards", 1, _lenet(shards, _GROW_EPOCHS, schedule), _flags(shards), timeout) as job:
        _, pids = job.whole(1)
        run = _finished(job, pids)
        sizes = sorted({line["size"] for line in job.lines()})
        if sizes != [1, 2, 4]:
            raise ValueError(f"there were clusters of {sizes} workers")
        return run


def _struck(kind: str, shards: Shards, runs: Sequence[Run], count: int, wrong: list[str], out: report.Report) -> None:
    if not runs:
        out.records.append(_record(kind, "lenet", 4, wrong[0] if wrong else "no run", count=count))
        print(_said(out.records[-1], f"{kind}: no run can be told of"), flush=True)
        return
    worst = max(runs, key=lambda run: run.longest_ms / run.limit_ms)
    good = sum(run.longest_ms <= run.limit_ms for run in runs)
    compiled = max(run.compiled for run in runs)
    record = _record(
        kind, "lenet", 4, wrong[0] if wrong else None, shards=shards, count=count,
        median_step_ms=round(statistics.median(run.median_ms for run in runs), 3),
        longest_ms=[round(run.longest_ms, 3) for run in runs], longest_in_medians=[round(r.medians, 2) for r in runs],
        at_step=[run.at_step for run in runs], worst_ms=round(worst.longest_ms, 3), limit_ms=round(worst.limit_ms, 3),
        within_limit=good, compiled=compiled, compiled_before=runs[0].compiled_before,
    )  # fmt: skip
    out.records.append(record)
    longest = sorted(run.longest_ms for run in runs)
    text = (
        f"{kind}: {len(runs)} of {count} runs, a median step of {record['median_step_ms']:.1f} ms, the longest of each "
        f"run {longest[0]:.1f} to {longest[-1]:.1f} ms (median {statistics.median(longest):.1f}), at worst "
        f"{worst.longest_ms:.1f} ms = {worst.medians:.1f} medians ({_within(worst.longest_ms, worst.limit_ms)}, "
        f"{good} within it); graphs compiled after the first epoch: {compiled} (before: {runs[0].compiled_before})"
    )
    print(_said(record, text), flush=True)


def _tried(seeds: Iterable[int], attempt: Any, expected: Run | None) -> tuple[list[Run], list[str]]:
    runs: list[Run] = []
    wrong: list[str] = []
    for seed in seeds:
        try:
            run = attempt(random.Random(seed))
        except ValueError as error:
            wrong.append(f"run {seed}: {error}")
            continue
        if expected is not None and run.digest != expected.digest:
            wrong.append(f"run {seed}: the parameters are {run.digest}, one worker's {expected.digest}")
        runs.append(run)
    return runs, wrong


def kill(options: argparse.Namespace, out: report.Report, shards: Shards = _LENET_SHARDS) -> None:
    seeds = range(options.seed, options.seed + options.count)
    expected = _undisturbed(shards, _KILL_EPOCHS, options.timeout)
    runs, wrong = _tried(seeds, lambda rng: _killed(shards, rng, options.timeout), expected)
    _struck("kill" if shards else "kill-plain", shards, runs, options.count, wrong, out)


def grow(options: argparse.Namespace, out: report.Report, shards: Shards = _LENET_SHARDS) -> None:
    count = max(1, options.count // 10)  # each run takes as long as ten kills
    expected = _undisturbed(shards, _GROW_EPOCHS, options.timeout)
    runs, wrong = _tried(range(count), lambda rng: _grown(shards, options.timeout), expected)
    _struck("grow" if shards else "grow-plain", shards, runs, count, wrong, out)


_RUN: dict[str, Callable[[argparse.Namespace, report.Report], None]] = {
    "cost": cost, "table": table, "straggler": straggler, "kill": kill, "grow": grow,
    "kill-plain": partial(kill, shards=None), "grow-plain": partial(grow, shards=None),
}  # fmt: skip


def run(options: argparse.Namespace, out: report.Report) -> None:
    """Run the benchmark with the options from the command line."""
    for part in options.part:
        _RUN[part](options, out)
