"""``python -m tests.programs [NAME ...]``: programs as people have them, each on one device and under kungfu-run while
the cluster goes 1 -> 3 -> one is killed -> 3 -> 2, compared; prints a table. Small programs go 1 -> 2 -> rank 0 is
killed -> 2. They differ from one device only by rounding, and print a figure that all their weights decide.

What they need is installed, at the versions below and without its dependencies, into ``build/programs``; the
environment stays as it is. ``mindcv-train`` is mindcv's own train.py: give --mindcv, a checkout of it at 51b0636.

Each outcome is kept in ``results.jsonl`` of --out as it comes, and a run that is begun again does what isn't there yet.
Networks with batch normalization are trained a third time, on one device in three parts a step: what they lose by
seeing smaller parts of a batch, they lose there, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.programs import data, running
from tests.programs.running import HERE, Command, Job, lines_changed, stock

BUILD = HERE.parents[1] / "build" / "programs"
MINDCV = ("mindcv==0.3.0", "PyYAML==6.0.3")
MINDONE = (
    "mindone==0.5.0", "transformers==4.57.1", "tokenizers==0.22.2", "huggingface_hub==0.36.2", "hf-xet==1.8.0",
    "requests==2.34.2", "urllib3==2.8.0", "certifi==2026.10.18", "charset-normalizer==3.5.2", "filelock==4.2.12",
    "fsspec==2026.9.0", "regex==2026.11.15", "sentencepiece==0.2.3", "PyYAML==6.0.3", "mindcv==0.3.0",
    "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3", "trampoline==0.1.2", "opencv-python-headless==4.10.0.84",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    what: str
    mode: str
    file: str
    arguments: tuple[str, ...] = ("{seed}",)
    needs: tuple[str, ...] = ()
    msrun: bool = False
    kills_the_first: bool = False
    pattern: str = r"accuracy: (\S+)"
    after: int = 60
    """The step from which on the cluster changes: in a later epoch than the first."""
    alone: tuple[str, ...] | None = None
    """Arguments on one device, where they are others."""
    normalizes: bool = False
    """Whether its network sees how large a part of the batch is."""
    begins: int = 1
    """How many workers it begins with."""
    size: int = 3
    """How many workers it has at most."""
    tolerance: float | None = None
    """How far the figure may be from that of one device, relatively: how a small program is compared."""
    partitions: bool = True
    """Whether it has an `ElasticDataset`, and so a ledger."""


def small(what: str, mode: str, file: str, **others: Any) -> Program:
    """A program of a few dozen steps whose two runs see the same samples and noise, so that they differ by rounding.

    A sum in another order changes a step's gradient by some 1e-6. Fifty steps of networks as small as these amplify
    that to less than 1e-3, while a step, a sample or a moment that is lost or counted twice changes more.
    """
    others = {"pattern": r"figure: (\S+)", "after": 6, "tolerance": 1e-3, **others}
    return Program(what, mode, file, kills_the_first=True, size=2, **others)


@dataclass(frozen=True)
class Result:
    """Of one seed."""

    name: str
    seed: int
    stock: float
    elastic: float
    equal: bool
    exact: bool
    changed: int
    """Lines."""
    history: str
    in_parts: float | None
    """The accuracy on one device in `PARTS` parts a step."""
    day: str


PARTS = 3  # as many as there are workers at most, and shards


_MINDCV = ("{data}/mnist", "{seed}")
_TRAIN = (
    "--dataset=mnist", "--data_dir={data}/mnist", "--val_split=test", "--image_resize=28", "--in_channels=1",
    "--model=mobilenet_v1_025",
    "--num_classes=10", "--opt=momentum", "--lr=0.05", "--warmup_epochs=0", "--decay_epochs=5", "--epoch_size=5",
    "--num_parallel_workers=1", "--val_while_train", "--seed={seed}", "--log_interval=20",
)  # fmt: skip
PROGRAMS = {
    "own-step": Program("GradOperation in a TrainOneStepCell, Model.fit with 4 callbacks", "GRAPH", "own_step.py"),
    "lstm": Program("LSTM, padded sequences, own loop", "GRAPH", "lstm.py", kills_the_first=True),
    "dcgan": Program("DCGAN, two optimizers, own loop", "GRAPH", "dcgan.py"),
    "albert": Program(
        "mindone 0.5.0, ALBERT of 2 layers, own loop", "PyNative", "albert.py", needs=MINDONE,
        kills_the_first=True, after=15,
    ),
    "wgan-gp": small("WGAN-GP, the generator in every fifth step, own loop", "GRAPH", "wgan_gp.py"),
    "pinn": small("PINN of Burgers' equation, derivatives of second order, own loop", "GRAPH", "pinn.py"),
    "ppo": small(
        "PPO, environments instead of data, own loop", "PyNative", "ppo.py", partitions=False,
    ),
    "gcn": small("GCN over a whole graph, no dataset, own loop", "GRAPH", "gcn.py", partitions=False),
    "mindyolo": small(
        "the calls of mindyolo's train.py, one pass over repeat()", "GRAPH", "like_mindyolo.py",
        msrun=True, begins=2, tolerance=1e-2,
    ),
    "ddpm": small("DDPM trainer, EMA, one pass over repeat() with break", "PyNative", "ddpm.py"),
    "wide-deep": small("Wide&Deep, FTRL and LazyAdam in one cell, sparse tables", "GRAPH", "wide_deep.py"),
    "own-loop": Program(
        "own loop with nn.DistributedGradReducer, written for msrun", "GRAPH", "own_loop_msrun.py", msrun=True
    ),
    "mobilenet": Program(
        "mindcv 0.3.0, mobilenet_v1_025, Model.train", "GRAPH", "mindcv_models.py",
        (*_MINDCV, "mobilenet_v1_025", "5"), MINDCV, normalizes=True,
    ),
    "resnet18": Program(
        "mindcv 0.3.0, resnet18, Model.train", "GRAPH", "mindcv_models.py",
        (*_MINDCV, "resnet18", "3"), MINDCV, kills_the_first=True, normalizes=True,
    ),
    "resnet50": Program(
        "ResNet-50 on CIFAR-10, written for msrun", "GRAPH", "resnet50_msrun.py", ("{data}/cifar", "{seed}"),
        msrun=True, kills_the_first=True, normalizes=True,
    ),
    **{
        f"mindcv-train{'' if mode == 'GRAPH' else '-pynative'}": Program(
            "mindcv's train.py --distribute at 51b0636, unmodified", mode, "{mindcv}/train.py",
            (*_TRAIN, "--mode", str(number), "--distribute", "--batch_size", "8"), MINDCV, msrun=True,
            kills_the_first=True, pattern=r"Validation Top_1_Accuracy: (\S+)%",
            alone=(*_TRAIN, "--mode", str(number), "--batch_size", "24"), normalizes=True,
        )
        for number, mode in enumerate(("GRAPH", "PyNative"))
    },
}  # fmt: skip


def install(needs: Sequence[str]) -> list[str]:
    """Into a folder of its own, which is returned."""
    if not needs:
        return []
    folder = BUILD / "packages" / needs[0]
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(part), *needs]
        subprocess.run(command, check=True)
        part.rename(folder)
    return [str(folder)]


def commands(program: Program, seed: int, folder: Path, mindcv: str | None) -> tuple[Command, Command, int]:
    """On one device, under kungfu-run, and the lines that differ."""
    names = {"seed": str(seed), "data": str(data.folder(BUILD / "data")), "mindcv": mindcv or ""}
    path = install(program.needs)
    file = Path(program.file.format(**names))
    elastic = Command(HERE / file, [each.format(**names) for each in program.arguments], path, program.pattern)
    if program.alone is not None:
        arguments = [each.format(**names) for each in program.alone]
        return Command(elastic.file, arguments, path, program.pattern), elastic, 0
    text = elastic.file.read_text()
    folder.mkdir(parents=True, exist_ok=True)
    alone = folder / f"stock_{elastic.file.name}"
    alone.write_text(stock(text))
    return Command(alone, elastic.arguments, path, program.pattern), elastic, lines_changed(text)


def try_one(name: str, seed: int, folder: Path, mindcv: str | None = None) -> Result:
    """On one device, and under kungfu-run."""
    program, own = PROGRAMS[name], folder / name / str(seed)
    shutil.rmtree(own, ignore_errors=True)
    alone, elastic, changed = commands(program, seed, own, mindcv)
    accuracy = alone.run(own / "stock")
    in_parts = alone.run(own / "in_parts", PARTS) if program.normalizes else None
    with Job(elastic, own / "elastic", program.msrun, program.begins, program.size) as job:
        history = job.change(program.kills_the_first, program.after)
        outcome = job.finish(program.partitions)
    day = time.strftime("%Y-%m-%d")
    return Result(name, seed, accuracy, outcome.accuracy, outcome.equal, outcome.exact, changed, history, in_parts, day)


def kept(file: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def row(name: str, found: Sequence[Result]) -> str:
    program = PROGRAMS[name]
    digits = ".3f" if program.tolerance is None else ".6f"

    def accuracies(each: Sequence[float | None]) -> str:
        known = [one for one in each if one is not None]
        return f"{sum(known) / len(known):{digits}} ({', '.join(f'{one:{digits}}' for one in known)})" if known else ""

    return " | ".join([
        f"| `{name}`: {program.what}", program.mode, str(found[0].changed) + (", `--msrun`" if program.msrun else ""),
        "rank 0" if program.kills_the_first else "another",
        "yes" if all(each.equal for each in found) else "**no**",
        "exact" if all(each.exact for each in found) else "**not exact**",
        accuracies([each.elastic for each in found]), accuracies([each.in_parts for each in found]),
        f"{accuracies([each.stock for each in found])} |",
    ])  # fmt: skip


HEAD = (
    "| program | mode | lines changed | killed | weights equal | audit | accuracy, elastic "
    f"| stock, in {PARTS} parts a step | stock |\n" + "|---" * 9 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; all by default")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each, 3 by default")
    parser.add_argument("--mindcv", metavar="PATH", help="a checkout of mindcv at 51b0636, for mindcv-train")
    parser.add_argument(
        "--out", type=Path, default=BUILD / "runs", metavar="PATH", help="logs, ledgers, what they write"
    )
    parser.add_argument("--limit", type=float, default=running.LIMIT_S, metavar="SECONDS", help="of what is waited for")
    given = parser.parse_args()
    running.LIMIT_S = given.limit
    unknown = set(given.names) - set(PROGRAMS)
    if unknown:
        parser.error(f"there is no program {sorted(unknown)[0]!r}")
    names = given.names or [name for name in PROGRAMS if given.mindcv or "{mindcv}" not in PROGRAMS[name].file]
    if not given.mindcv and any("{mindcv}" in PROGRAMS[name].file for name in names):
        parser.error("mindcv-train needs --mindcv, a checkout of mindcv at 51b0636")
    out = given.out.resolve()
    mindcv = given.mindcv and str(Path(given.mindcv).resolve())
    file, failed = out / "results.jsonl", 0
    for seed in range(1, given.seeds + 1):
        for name in names:
            if any((each.name, each.seed) == (name, seed) for each in kept(file)):
                continue
            try:
                result = try_one(name, seed, out, mindcv)
            except (AssertionError, subprocess.SubprocessError) as error:
                print(f"{name}, seed {seed}, failed: {error}", file=sys.stderr, flush=True)
                failed += 1
                continue
            print(result, file=sys.stderr, flush=True)
            with file.open("a") as lines:
                print(json.dumps(asdict(result)), file=lines)
    print(HEAD)
    for name in names:
        found = [each for each in kept(file) if each.name == name]
        if found:
            print(row(name, found))
    sys.exit(f"{failed} failed" if failed else 0)


if __name__ == "__main__":
    main()
