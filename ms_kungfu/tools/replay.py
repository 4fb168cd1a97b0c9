"""Run training with shards again, and report where its exact results differ.

The command is ``python -m ms_kungfu.replay LEDGER --until STEP -- python train.py ...``.

The exact results of training with shards depend on the program and its seed, and not on the cluster (docs/shards.md).
So one worker that runs the program again gets bitwise identical results. If the results differ, either faulty hardware
has altered the results, or the results depend on a value on which they must not depend. The replay compares the
fingerprints that the ledger contains at regular steps. At the first difference, it reports the step and the Parameter,
and ends the program.

The program runs in the numeric environment that the ledger has recorded: with the same number of cores per worker, and
with oneDNN limited to the same instruction set. The replay requests no resize and writes no ledger. Callbacks from
ms_kungfu and MindSpore write no checkpoints. The program writes its own files again, so configure another folder for
these files.

The exit status is 0 if the results are bitwise identical, 1 if they differ, and 2 if they can't be compared; a message
then names the reason.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ms_kungfu import env
from ms_kungfu._cpu_isa import VARIABLE as _ISA
from ms_kungfu._cpu_isa import names as isa_names
from ms_kungfu._flags import failed
from ms_kungfu._processes import ended_by_signals
from ms_kungfu._words import counted
from ms_kungfu.dataset import conditions, ledger
from ms_kungfu.dataset.history import history
from ms_kungfu.dataset.ledger import Claim, Record
from ms_kungfu.dataset.replaying import Orders, Outcome, Recorded
from ms_kungfu.errors import KungFuError

_PROGRAM = "python -m ms_kungfu.replay"
_CHECKPOINT = re.compile(r"step-(\d{8,})(?:\.job\d+)?\.ckpt")


def main(words: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if words is None else words)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:cut])
    try:
        command = arguments[cut + 1 :]
        if not command:
            raise KungFuError("no program given; pass the program to run again: -- python train.py ARGUMENT ...")
        orders = plan(options.ledger, options.until, options.checkpoint)
        machine = next(iter(orders.conditions.values()), {})
        cores = _cores(machine)
        with tempfile.TemporaryDirectory(prefix="kungfu-replay-") as folder:
            if options.checkpoint is not None:
                (Path(folder) / options.checkpoint.name).symlink_to(options.checkpoint.resolve())
                orders = Orders(orders.recorded, orders.conditions, folder)
            with ended_by_signals():  # so that a signal also ends the program
                status, outcome = _run(command, orders, Path(folder) / "orders.json", cores, machine.get("isa"))
        return _tell(orders, status, outcome)
    except (OSError, ValueError, KungFuError) as error:
        return failed(_PROGRAM, error, 2)
    except KeyboardInterrupt:
        return failed(_PROGRAM, "interrupted", 2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(failed(_PROGRAM, f"{message}; -h shows the arguments", 2))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        usage="%(prog)s [-h] LEDGER [--until STEP] [--from CHECKPOINT] -- PROGRAM [ARGUMENT ...]",
        description="Runs training with shards again as one worker, and compares its results with the ledger's.",
        epilog="Exit status: 0: identical results; 1: different results; 2: the results can't be compared.",
    )
    parser.add_argument("ledger", metavar="LEDGER", type=Path, help="the training run's ledger= or KUNGFU_LEDGER_DIR")
    parser.add_argument(
        "--until", metavar="STEP", type=int, help="the last step to compare (default: all recorded steps)"
    )
    parser.add_argument(
        "--from", metavar="CHECKPOINT", type=Path, dest="checkpoint",
        help="the file step-N.ckpt of checkpoint_dir to start from (default: start from the beginning)",
    )  # fmt: skip
    return parser


def plan(folder: Path, until: int | None = None, checkpoint: Path | None = None) -> Orders:
    """Return the ledger's fingerprints to compare: those after the step of `checkpoint`, up to step `until`.

    Raises:
        KungFuError: nothing can be compared.
    """
    files, problems, _ = ledger.read(folder)
    if not files:
        raise KungFuError(f"{folder} has no ledger: there is no file *.jsonl")
    for problem in problems:
        print(f"{_PROGRAM}: {problem}", file=sys.stderr)
    records = history([record for records in files.values() for record in records]).records
    steps = [record for record in records if isinstance(record.claim, Claim)]
    if not any(record.claim.shards for record in steps if isinstance(record.claim, Claim)):
        raise KungFuError(
            f"the ledger {folder} records a run without shards, and the exact result of such a run depends on its "
            "cluster changes: only a run with ElasticDataset(..., shards=) can be replayed"
        )
    found = [(record, record.fingerprint.step) for record in steps if record.fingerprint is not None]
    if not found:
        raise KungFuError(
            f"the ledger {folder} has no fingerprints: ElasticTraining and KungFuElasticCallback record one every "
            "N steps, where N is ledger_fingerprints= (50 by default)"
        )
    first, last = min(step for _, step in found), max(step for _, step in found)
    after = 0
    if checkpoint is not None:
        after = _step_of(checkpoint)
    else:
        _check_begins(folder, steps, {record.data for record, _ in found})
    chosen = [record for record, step in found if after < step and (until is None or step <= until)]
    if not chosen:
        most = "" if until is None else f" and up to step {until}"
        raise KungFuError(
            f"the ledger {folder} has no fingerprint later than step {after}{most}; "
            f"it has fingerprints for steps {first} to {last}"
        )
    return Orders(_group(chosen), _conditions(folder, {record.job for record in chosen}))


def _step_of(checkpoint: Path) -> int:
    name = _CHECKPOINT.fullmatch(checkpoint.name)
    if name is None or not checkpoint.is_file():
        raise KungFuError(f"{checkpoint} is not a checkpoint; give a file step-N.ckpt from a checkpoint_dir")
    return int(name[1])


def _check_begins(folder: Path, steps: Sequence[Record], datasets: set[int]) -> None:
    for data in sorted(datasets):
        epoch, number = min(record.place for record in steps if record.data == data)
        if (epoch, number) != (0, 0):
            raise KungFuError(
                f"the ledger {folder} begins in epoch {epoch} with step {number}: give --from CHECKPOINT, the "
                "checkpoint from which the recorded training continued, or a later one"
            )


def _group(chosen: Sequence[Record]) -> list[Recorded]:
    """Return one entry for each step, sorted by step, with the fingerprints of all ranks."""
    steps: dict[tuple[int, int, int], list[Record]] = {}
    for record in chosen:
        steps.setdefault((record.data, *record.place), []).append(record)
    grouped = []
    for (data, epoch, number), records in sorted(steps.items()):
        had: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for record in records:
            assert record.fingerprint is not None
            had.setdefault(tuple(record.fingerprint.tensors.items()), []).append(record.rank)
        claim, fingerprint = records[0].claim, records[0].fingerprint
        assert isinstance(claim, Claim)
        assert claim.shards is not None
        assert fingerprint is not None
        tensors = tuple((tuple(ranks), dict(names)) for names, ranks in had.items())
        place = data, epoch, number, fingerprint.step
        grouped.append(Recorded(*place, claim.order, claim.batch, claim.shards.unit, tensors))
    return grouped


def _conditions(folder: Path, jobs: set[str]) -> dict[str, Mapping[str, Any]]:
    """Return, by dataset number, the numeric environments of the jobs that have recorded the fingerprints."""
    found: dict[str, Mapping[str, Any]] = {}
    job_of: dict[str, str] = {}
    for header in sorted(ledger.headers(folder), key=lambda header: header.get("time", 0)):
        if header.get("job") not in jobs or "conditions" not in header:
            continue
        data = str(header["data"])
        own = {key: value for key, value in header["conditions"].items() if key not in conditions.ARGUMENTS}
        first, job = found.setdefault(data, own), job_of.setdefault(data, header["job"])
        told = conditions.differences(first, own, f"in job {job}", f"in job {header['job']}")
        if told:
            raise KungFuError(
                f"the ledger {folder} was recorded in several numeric environments ({told}): use --until STEP or "
                "--from CHECKPOINT to select steps with only one"
            )
    return found


def _cores(machine: Mapping[str, Any]) -> set[int]:
    """Return the cores on which the program runs: as many as each worker had in the recorded job."""
    allowed, cores = sorted(os.sched_getaffinity(0)), machine.get("cores", 1)
    if cores > len(allowed):
        raise KungFuError(
            f"each recorded worker had {cores} cores, and this number affects the bits, but this process may use "
            f"{len(allowed)}: run the replay on a machine with at least as many cores"
        )
    return set(allowed[:cores])


def _run(command: Sequence[str], orders: Orders, path: Path, cores: set[int], isa: str | None) -> tuple[int, Outcome]:
    """Run the program. Return the program's exit status and the result of the comparison."""
    orders.save(path)
    own = {env.REPLAY.name: str(path), env.CORES_PER_WORKER.name: str(len(cores))}
    if isa in isa_names():
        own[_ISA] = str(isa)
    count, on = len(orders.recorded), counted(len(cores), "core")
    if _ISA in own:
        on += f" with {_ISA}={own[_ISA]}"
    until = orders.recorded[-1].step
    print(f"{_PROGRAM}: comparing {count} fingerprints up to step {until}, on {on}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, env={**os.environ, **own}, preexec_fn=lambda: os.sched_setaffinity(0, cores), check=False
    )
    return done.returncode, Outcome.load(path)


def _tell(orders: Orders, status: int, outcome: Outcome) -> int:
    """Print the result, and return the exit status."""
    same = counted(outcome.same, "fingerprint")
    if outcome.wrong:
        return failed(_PROGRAM, outcome.wrong, 2)
    if outcome.difference:
        before = (
            f"the same up to step {outcome.step}, in {same}"
            if outcome.same
            else "this is the first step that is compared"
        )
        print(f"{outcome.difference}; {before}", flush=True)
        return 1
    if outcome.same == len(orders.recorded):
        print(f"same bits: {same} up to step {outcome.step}", flush=True)
        return 0
    until = f", up to step {outcome.step}," if outcome.same else ""
    ended = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
    return failed(
        _PROGRAM,
        f"the program {ended} when {same} of {len(orders.recorded)}{until} had been compared and were equal; start "
        "it with its original arguments",
        2,
    )
