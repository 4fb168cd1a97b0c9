"""The command line of ``python -m benchmarks.churn``."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.churn import cost, peers, table
from benchmarks.churn.driver import Failed, NotApplicable, Run, carry_out
from benchmarks.churn.schedule import SCENARIOS
from benchmarks.churn.systems import OWN, SYSTEMS
from benchmarks.churn.workloads import WORKLOADS
from ms_kungfu._processes import ended_by_signals

_OUT = Path("benchmarks/churn/results")
_SEARCHED = (10, 40, 160, 640)  # steps between two checkpoints
_SEARCH_SEED, _SEARCH_S = 1001, 60.0
_RARE = 640  # steps, without failures
_EVERY = {"kill": (30.0, 10.0, 5.0, 1.0), "resize": (20.0,), "host": (60.0,)}
_QUICK: dict[str, Any] = {"systems": [OWN, "torchrun"], "workloads": ["lenet"], "scenarios": ["none", "kill"],
                          "every": [10.0], "seconds": 25.0, "rounds": 1}  # fmt: skip


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _numbers(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if min(found) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: give numbers above 0")
    return found


def _out(text: str) -> Path:
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: the folder {Path(text).parent} doesn't exist; create it")
    return Path(text)


def _file(arguments: argparse.Namespace, suffix: str) -> Path:
    return Path(f"{arguments.out}{suffix}")


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.churn",
        description="Kills workers of ms_kungfu and of other systems at the same times, and measures what it costs. "
        "The exit status is 1 if a run of ms_kungfu lost a sample, trained one twice, or didn't end.",
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--peers", type=Path, default=peers.FOLDER, metavar="DIR", help="the peers' virtual environment"
    )
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--out", type=_out, default=_OUT, metavar="NAME", help=f"NAME.csv, .md, .png (default {_OUT})")

    commands.add_parser("setup", parents=[common], help="install the other systems")
    run = commands.add_parser("run", parents=[common, out], help="measure, and add the runs to NAME.csv")
    run.add_argument("--systems", type=_names, default=list(SYSTEMS), metavar="NAME,...", help=", ".join(SYSTEMS))
    run.add_argument("--workloads", type=_names, default=list(WORKLOADS), metavar="NAME,...")
    run.add_argument("--scenarios", type=_names, default=list(SCENARIOS), metavar="NAME,...", help=", ".join(SCENARIOS))
    run.add_argument("--every", type=_numbers, metavar="S,...", help="seconds between events (default 30,10,5,1 for "
                     "kill, 20 for resize, 60 for host)")  # fmt: skip
    run.add_argument("--seconds", type=float, default=300.0, metavar="S", help="of a run (default 300)")
    run.add_argument("--rounds", type=int, default=1, help="of all (default 1)")
    run.add_argument("--seed", type=int, default=1, help="of the schedule (default 1)")
    run.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="of systems with checkpoints, instead of "
                     "the best of a search")  # fmt: skip
    run.add_argument("--quick", action="store_true", help="ms_kungfu and torchrun, one interval: three minutes")
    commands.add_parser("table", parents=[common, out], help="make NAME.md and NAME.png from NAME.csv")
    price = commands.add_parser("cost", parents=[common, out], help="cost without failures, into NAME.csv and NAME.md")
    price.add_argument("--workloads", type=_names, default=["lenet", "mlp"], metavar="NAME,...")
    price.add_argument("--workers", type=_numbers, default=[1, 2, 4], metavar="N,...", help="default 1,2,4")
    price.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of a run (default 20)")
    price.add_argument("--rounds", type=int, default=5, help="default 5")
    return result


class _Session:
    """The runs of a command. Each run is printed and stored when it ends."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.interpreter = peers.python(arguments.peers)
        self._csv = _file(arguments, ".csv")
        self._versions = {name: peers.versions(system, self.interpreter) for name, system in SYSTEMS.items()}
        self.bad: list[str] = []

    def has(self, system: str) -> bool:
        return self._versions[system] is not None

    def do(self, run: Run, mark: str = "") -> dict[str, Any] | None:
        """Return the row of a run, or None if the system can't do the scenario. `mark`: added to its switches."""
        facts = machine.facts()
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{facts['machine']['cores']} cores of {facts['machine']['cpu']}",
            "commit": facts["commit"],
            "versions": " ".join(f"{k}={v}" for k, v in (self._versions[run.system] or {}).items()),
            "load": round(os.getloadavg()[0], 1),
            **{name: getattr(run, name) for name in
               ("system", "workload", "scenario", "every", "seed", "workers", "checkpoint_every")},
            "switches": "+".join([*run.switches, *filter(None, [mark])]),
        }  # fmt: skip
        try:
            found = carry_out(run, self.interpreter)
        except NotApplicable as reason:
            print(f"churn: {run.system}, {run.scenario}: {reason}", flush=True)
            return None
        except Failed as error:
            print(f"churn: {run.system}: {error}", file=sys.stderr, flush=True)
            found = {"seconds": run.seconds, "rate": 0.0, "useful": 0, "kills": 0, "hung": True,
                     "wrong": str(error).splitlines()[0]}  # fmt: skip
        row = {**about, **found}
        table.append(self._csv, row)
        told = ("rate", "next_step_p50_s", "lost", "twice", "equal_weights", "accuracy", "hung", "wrong")
        what = f"{run.system}, {run.workload}, {run.scenario} {run.every:g} s, checkpoints {run.checkpoint_every}"
        print(f"churn: {what}: " + " ".join(f"{name}={found.get(name)}" for name in told), flush=True)
        if run.system.startswith(OWN) and not mark:
            if found["hung"] or found["wrong"] or found["lost"] or found["twice"] or not found["equal_weights"]:
                self.bad.append(what)
        return row

    def best_interval(self, run: Run) -> int:
        """Return the checkpoint interval (steps) with the most useful samples, in short runs with another seed."""
        rates = {}
        for steps in _SEARCHED:
            row = self.do(replace(run, checkpoint_every=steps, seed=_SEARCH_SEED, seconds=_SEARCH_S), "search")
            rates[steps] = 0.0 if row is None else row["rate"]
        return max(rates, key=lambda steps: rates[steps])


def _grid(arguments: argparse.Namespace) -> Iterator[tuple[str, str, float]]:
    """Yield workload, scenario and interval, those without failures first."""
    for workload in arguments.workloads:
        for scenario in sorted(arguments.scenarios, key=SCENARIOS.index):
            for every in (0.0,) if scenario == "none" else arguments.every or _EVERY[scenario]:
                yield workload, scenario, every


def _measure(arguments: argparse.Namespace) -> int:
    if arguments.quick:
        vars(arguments).update(_QUICK)
        arguments.checkpoint_every = arguments.checkpoint_every or 40
    for option, known in (("systems", SYSTEMS), ("workloads", WORKLOADS), ("scenarios", SCENARIOS)):
        unknown = set(getattr(arguments, option)) - set(known)
        if unknown:
            print(f"churn: --{option} {sorted(unknown)[0]}: there are {', '.join(known)}", file=sys.stderr)
            return 2
    session = _Session(arguments)
    for name in (name for name in arguments.systems if not session.has(name)):
        print(f"churn: {name} isn't installed: python -m benchmarks.churn setup", flush=True)
    systems = [name for name in arguments.systems if session.has(name)]
    if not systems:
        return 2
    intervals: dict[tuple[str, str, str, float], int] = {}
    for _, (workload, scenario, every), system in itertools.product(
        range(arguments.rounds), list(_grid(arguments)), systems
    ):
        run = Run(system, workload, scenario, every, arguments.seconds, arguments.seed, checkpoint_every=_RARE)
        if scenario != "none" and SYSTEMS[system].checkpoints:
            key = (system, workload, scenario, every)
            if key not in intervals:
                intervals[key] = arguments.checkpoint_every or session.best_interval(run)
            run = replace(run, checkpoint_every=intervals[key])
        elif scenario != "none":
            run = replace(run, checkpoint_every=Run.checkpoint_every)
        session.do(run)
    _show(arguments)
    for what in session.bad:
        print(f"churn: WRONG: {what}", file=sys.stderr)
    return 1 if session.bad else 0


def _cost(arguments: argparse.Namespace) -> int:
    session = _Session(arguments)
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for _, workload, workers in itertools.product(range(arguments.rounds), arguments.workloads, arguments.workers):
        for variant in cost.VARIANTS:
            if session.has(variant.system):
                row = session.do(variant.run(workload, int(workers), arguments.seconds), "cost")
                if row is not None:
                    rates = found.setdefault((workload, int(workers)), {})
                    # Without a reduction, the numbers describe only the slowest worker.
                    alone = "reduction" in variant.without
                    rates.setdefault(variant.name, []).append(row["rate"] * (workers if alone else 1))
    text = cost.markdown(found)
    _file(arguments, ".md").write_text(text)
    print(text)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from benchmarks.churn import picture

    if not _file(arguments, ".csv").exists():
        print(f"churn: {_file(arguments, '.csv')} doesn't exist; run python -m benchmarks.churn run", file=sys.stderr)
        return 2
    rows = table.read(_file(arguments, ".csv"))
    found = table.cells(rows)
    text = table.markdown(found, peers.errors(arguments.peers))
    _file(arguments, ".md").write_text(text)
    print(text)
    if any(cell.scenario == "kill" for cell in found):
        about = " and ".join(sorted({f"{row['machine']}, {row['date']}" for row in rows}))
        picture.draw(found, _file(arguments, ".png"), about)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark. Exit status: 1 if a run of ms_kungfu was wrong, 2 for a wrong command line."""
    arguments = parser().parse_args(words)
    if arguments.command == "setup":
        peers.setup(arguments.peers)
        return 0
    with contextlib.suppress(KeyboardInterrupt), ended_by_signals():
        return {"run": _measure, "table": _show, "cost": _cost}[arguments.command](arguments)
    return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
