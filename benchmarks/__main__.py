"""The command line of ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import collectives, contenders, everything, optimizers, parts, pauses, resize, shards, simulate, step
from benchmarks.group import GroupError
from benchmarks.report import Report, read
from benchmarks.workload import DTYPES
from ms_kungfu._processes import ended_by_signals
from ms_kungfu.comm import OPS
from ms_kungfu.fusion.shapes import GRADIENTS

_MODELS = ["lenet", "resnet50", "bert-base"]
_SIZES = "4,64K,1M,16M,64M,256M"
# Options whose values are lists of names: what a name stands for, and all valid names.
_KNOWN: dict[str, tuple[str, Collection[str]]] = {
    "through": ("face ", contenders.THROUGH),
    "dtype": ("dtype ", DTYPES),
    "models": ("model ", GRADIENTS),
    "pauses": ("", pauses.KINDS),
    "program": ("", pauses.PROGRAMS),
    "part": ("part ", shards.PARTS),
    "networks": ("network ", (*shards.NETWORKS, "resnet50", "transformer2")),
}
_RANKS = {"step": [1], "parts": [1, 2], "shards": [2, 4]}  # default ranks; 2 for all other benchmarks
_TRAINING: dict[str, Any] = {"step": step, "parts": parts, "optimizers": optimizers}


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4, 64K or 16M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def _sizes(text: str) -> list[int]:
    return [_size(part) for part in text.split(",")]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _hosts(text: str) -> list[int]:
    found = _numbers(text)
    if min(found) < 2:
        raise argparse.ArgumentTypeError("between hosts means at least 2")
    return found


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times collectives and operations built on them, with peers in the same run. Times are those "
        "of the slowest rank; results are verified; the exit status is 1 if one was wrong.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = argparse.ArgumentParser(add_help=False)
    run.add_argument(
        "-np",
        "--ranks",
        type=_numbers,
        metavar="N,...",
        help="ranks (default 2; 1 for step, 1,2 for parts, 2,4 for shards)",
    )
    run.add_argument("--rounds", type=_positive, default=5, help="interleaved rounds (default 5)")
    run.add_argument("--samples", type=_positive, help="timed samples in each round (default: by size)")
    run.add_argument(
        "--timeout", type=_positive, default=300, metavar="S", help="limit for each answer (default 300 s)"
    )
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", metavar="FILE", help="write one JSON object for each result; - is standard output")
    output.add_argument("--plot", metavar="FILE.png", help="draw a picture")

    peers = argparse.ArgumentParser(add_help=False)
    peers.add_argument(
        "--vs",
        type=_names,
        default=[],
        metavar="NAME,...",
        help=f"peers: {', '.join(contenders.PEERS)}, or module:Class of your own",
    )
    collective = argparse.ArgumentParser(add_help=False)
    collective.add_argument(
        "--through",
        type=_names,
        default=["native"],
        metavar="FACE,...",
        help=f"interfaces of the runtime: {', '.join(contenders.THROUGH)} (default native)",
    )
    collective.add_argument("--dtype", type=_names, default=["float32"], metavar="NAME,...", help="default float32")
    collective.add_argument("--op", choices=OPS, default="sum", help="default sum")
    collective.add_argument("--root", type=int, default=0, help="root of a broadcast (default 0)")
    collective.add_argument(
        "--fresh-from",
        type=_size,
        default=1 << 20,
        metavar="SIZE",
        help="from this size on, alternate between buffers of twice the last-level cache in total (default 1M)",
    )
    sized = argparse.ArgumentParser(add_help=False)
    sized.add_argument("--sizes", type=_sizes, default=_sizes(_SIZES), metavar="SIZE,...", help=f"default {_SIZES}")

    for name in ("all_reduce", "broadcast"):
        commands.add_parser(name, parents=[run, peers, collective, sized, output], help=f"{name} of one tensor")
    command = commands.add_parser(
        "gradients", parents=[run, peers, collective, output], help="all_reduce of a model's gradients"
    )
    command.add_argument(
        "--models",
        type=_names,
        default=_MODELS,
        help=f"of {', '.join(GRADIENTS)} (default {','.join(_MODELS)})",
    )

    trained = argparse.ArgumentParser(add_help=False)
    trained.add_argument("--networks", type=_names, default=["lenet"], metavar="NAME,...", help="default lenet")
    trained.add_argument("--mode", choices=("graph", "pynative"), default="graph", help="of MindSpore (default graph)")
    trained.add_argument("--batch", type=_positive, default=32, help="samples for each rank (default 32)")
    commands.add_parser(
        "step", parents=[run, peers, trained, output], help="a training step: KungFuMomentum against nn.Momentum"
    )
    commands.add_parser(
        "parts", parents=[run, trained, output], help="which share of a training step each part of ms_kungfu takes",
        description=parts.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip

    command = commands.add_parser(
        "optimizers", parents=[run, output], help="samples per second with S-SGD, SMA and pair averaging"
    )
    command.add_argument("--networks", type=_names, default=["lenet"], metavar="NAME,...", help="default lenet")
    command.add_argument("--batch", type=_positive, default=32, help="samples for each worker (default 32)")

    command = commands.add_parser("resize", parents=[output], help="changes of the cluster under kungfu-run")
    command.add_argument("--schedule", type=_numbers, default=[1, 2, 1], metavar="N,...", help="sizes (default 1,2,1)")
    command.add_argument("--rounds", type=_positive, default=3, help="repetitions of the schedule (default 3)")
    command.add_argument(
        "--state", type=_size, default=1 << 20, help="bytes that a joining worker receives (default 1M)"
    )
    command.add_argument("--step-ms", type=float, help="a step's computation, asleep (default 1; for --pauses 5)")
    command.add_argument(
        "--timeout", type=_positive, default=300, metavar="S", help="limit for the whole run (default 300 s)"
    )

    command.add_argument(
        "--pauses",
        type=_names,
        default=[],
        metavar="KIND,...",
        help="instead: how long training pauses at a kill -9 of a random worker of 4, a grow from 2 to 4 workers, "
        "grow-standby: with standbys, or a shrink from 4 to 2",
    )
    command.add_argument("--count", type=_positive, default=20, help="number of each kind of pause (default 20)")
    command.add_argument("--seed", type=int, default=1, help="seed of the kills (default 1)")
    command.add_argument(
        "--program", type=_names, default=["synthetic"], metavar="NAME,...", help="synthetic (default) and lenet"
    )

    command = commands.add_parser("shards", parents=[run], help="training with shards: cost and benefit")
    command.add_argument(
        "--part",
        type=_names,
        default=list(shards.PARTS),
        metavar="PART,...",
        help="cost: against the same without shards; table: by shards and workers, with memory; straggler: one worker "
        "of four is slow; kill: one of four is killed; grow: 1 -> 2 -> 4 workers; kill-plain, grow-plain: without "
        "shards (default all)",
    )
    command.add_argument(
        "--networks", type=_names, default=list(shards.NETWORKS), metavar="NAME,...", help="of cost and table"
    )
    command.add_argument("--count", type=_positive, default=20, help="kills (default 20; grow: a tenth of it)")
    command.add_argument("--seed", type=int, default=1, help="seed of the kills (default 1)")
    command.add_argument("--json", metavar="FILE", help="write one JSON object for each result; - is standard output")

    command = commands.add_parser("simulate", help="how long an all-reduce would take over many hosts")
    command.add_argument("--hosts", type=_hosts, default=[2, 8, 64, 1024], metavar="N,...", help="default 2,8,64,1024")
    command.add_argument("--sizes", type=_sizes, default=_sizes("4,64K,1M,16M,256M"), metavar="SIZE,...")
    command.add_argument(
        "--measured",
        metavar="FILE",
        help="times of a few hosts, one JSON object per line, to which the model is fitted",
    )
    command.add_argument("--megabits", type=_positive, metavar="N", help="instead: the bandwidth of each host")
    command.add_argument(
        "--measure",
        metavar="FILE",
        help="instead: time all-reduces, as the program of a job over several hosts, and add the times to FILE",
    )
    command.add_argument("--json", metavar="FILE", help="write one JSON object for each result; - is standard output")

    command = commands.add_parser("plot", help="draw results that were written before")
    command.add_argument("files", nargs="+", metavar="FILE.jsonl")
    command.add_argument("--plot", required=True, metavar="FILE.png")

    command = commands.add_parser("all", help="everything in docs/benchmarks, with the installed peers")
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    command.add_argument("--quick", action="store_true", help="tiny runs that show that it works, not how fast")
    return parser


def _check(arguments: argparse.Namespace) -> list[str]:
    """Return the names of the baselines. Raise ValueError if the arguments ask for what can't be measured."""
    for option, (what, known) in _KNOWN.items():
        for name in getattr(arguments, option, []):
            if name not in known:
                raise ValueError(f"no {what}{name!r}; there are {', '.join(known)}")
    for option in ("json", "plot"):
        file = getattr(arguments, option, None)
        folder = Path(file or "").absolute().parent
        if file not in (None, "-") and not os.access(folder, os.W_OK):
            raise ValueError(f"--{option}: no file can be written to {folder}")
    root = getattr(arguments, "root", 0)
    if not 0 <= root < min(getattr(arguments, "ranks", [1])):
        raise ValueError(f"root {root} is not a rank: there are only {min(arguments.ranks)} ranks")
    if getattr(arguments, "plot", None) and find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib; {contenders.REMEDY}")
    if arguments.command == "step" and set(arguments.vs) - {"mindspore"}:
        raise ValueError(f"step supports only the peer mindspore, not {','.join(arguments.vs)}")
    names = [contenders.THROUGH[f] for f in getattr(arguments, "through", [])]
    names += [name for name in getattr(arguments, "vs", []) if name not in names]
    if arguments.command in ("optimizers", "parts") and find_spec("mindspore") is None:
        raise ValueError(f"{arguments.command} needs mindspore; pip install mindspore")
    for name in names:
        missing = contenders.find(name).missing()
        if missing:
            raise ValueError(f"{name}: {missing}")
    return names


def _run(arguments: argparse.Namespace, names: Sequence[str], out: Report) -> None:
    if arguments.command == "resize":
        (pauses if arguments.pauses else resize).run(arguments, out)
    elif arguments.command == "shards":
        shards.run(arguments, out)
    elif arguments.command == "simulate":
        simulate.run(arguments, out)
    elif arguments.command in _TRAINING:
        for ranks in arguments.ranks:
            _TRAINING[arguments.command].run(arguments, ranks, out)
    else:
        shared = {field.name: getattr(arguments, field.name, None) for field in fields(collectives.Settings)}
        for ranks, dtype in itertools.product(arguments.ranks, arguments.dtype):
            settings = collectives.Settings(**{**shared, "contenders": names, "ranks": ranks, "dtype": dtype})
            if arguments.command == "gradients":
                collectives.gradients(arguments.models, settings, out)
            else:
                collectives.by_size(arguments.command, arguments.sizes, settings, out)


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmarks.

    Exit status: 1 if a result was wrong or a baseline failed, 2 for an invalid command line or a missing peer.
    """
    arguments = _parser().parse_args(words)
    if getattr(arguments, "ranks", []) is None:
        arguments.ranks = _RANKS.get(arguments.command, [2])
    if arguments.command == "resize" and arguments.step_ms is None:
        arguments.step_ms = 5.0 if arguments.pauses else 1.0
    if arguments.command == "all":
        return everything.run(arguments.out, arguments.quick, main)
    out = Report()
    try:
        names = _check(arguments)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    try:
        if arguments.command == "plot":
            out.records = read(arguments.files)
        else:
            with ended_by_signals():
                _run(arguments, names, out)
    except (GroupError, OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if getattr(arguments, "json", None):
        out.write(arguments.json)
    if getattr(arguments, "plot", None):
        from benchmarks import plot

        plot.draw(out.records, arguments.plot)
    for failure in out.failures:
        print(f"bench: {failure['contender']}: wrong result: {failure['wrong']}", file=sys.stderr)
    return 1 if out.failures else 0


if __name__ == "__main__":
    # The processes of the benchmark must find this package in any folder.
    own = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.exit(main())
