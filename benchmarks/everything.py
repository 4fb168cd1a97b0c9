"""`all`: create the results in docs/benchmarks, and record the command of each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

from benchmarks import contenders, machine

_OVERVIEW = ("all_reduce-2", "all_reduce-4", "gradients-2")
_PEERS = ("mpi", "gloo", "mindspore", "memcpy")


def _plan(peers: list[str], quick: bool) -> list[tuple[str, list[str]]]:
    """Return a tuple (base name of the files, command) for each result."""
    vs = ["--vs", ",".join(peers)]
    # MindSpore's collectives are so slow that they would take most of the time at large sizes.
    fast = ["--vs", ",".join(p for p in peers if p != "mindspore")]
    steps = ["--rounds", "15", *(["--vs", "mindspore"] if "mindspore" in peers else [])]
    faces = ["--through", "native,python,primitive,kernel"]
    plan = [
        ("all_reduce-2", ["all_reduce", "-np", "2", *fast]),
        ("all_reduce-4", ["all_reduce", "-np", "4", *fast]),
        ("all_reduce-faces-2", ["all_reduce", "-np", "2", "--sizes", "4,64K,1M,16M", *faces, *vs]),
        ("broadcast-2", ["broadcast", "-np", "2", *fast]),
        # Without BERT: its gradients as MindSpore tensors in two baselines would fill a small machine's memory.
        ("gradients-2", ["gradients", "-np", "2", "--models", "resnet50,lenet", "--through", "native,kernel", *fast]),
        ("gradients-bert-2", ["gradients", "-np", "2", "--models", "bert-base", *fast]),
        ("gradients-4", ["gradients", "-np", "4", *fast]),
        ("step-graph", ["step", "-np", "1,2", "--mode", "graph", *steps]),
        ("step-pynative", ["step", "-np", "1", "--mode", "pynative", *steps]),
        ("resize", ["resize", "--schedule", "1,2,4,1", "--rounds", "5"]),
    ]
    if not quick:
        return plan
    small = ["--rounds", "1", "--samples", "2"]
    sizes = {"all_reduce": ["--sizes", "4,64K"], "broadcast": ["--sizes", "4,64K"], "gradients": ["--models", "lenet"]}
    return [
        (name, [*words, *small, *sizes.get(words[0], [])] if words[0] != "resize" else [*words, "--rounds", "1"])
        for name, words in plan
    ]


def run(out: Path, quick: bool, command: Callable[[Sequence[str]], int]) -> int:
    """Write NAME.jsonl and NAME.png for each result, and commands.txt. Continue if a command fails.

    `command` runs one command line. Return the greatest exit status.
    """
    out.mkdir(parents=True, exist_ok=True)
    peers = []
    for name in _PEERS:
        missing = contenders.find(name).missing()
        if missing:
            print(f"bench: without {name}: {missing}", file=sys.stderr)
        else:
            peers.append(name)
    status = 0
    facts = machine.facts()
    commands = [f"# {facts['machine']['cores']} cores of {facts['machine']['cpu']}, commit {facts['commit']}"]

    def do(words: list[str]) -> int:
        commands.append(f"python -m benchmarks {shlex.join(words)}".replace(f"{out}/", ""))
        print(f"\n$ {commands[-1]}", flush=True)
        return command(words)

    for name, words in _plan(peers, quick):
        status = max(status, do([*words, "--json", f"{out / name}.jsonl", "--plot", f"{out / name}.png"]))
    shown = [str(out / f"{name}.jsonl") for name in _OVERVIEW if (out / f"{name}.jsonl").exists()]
    if shown:
        status = max(status, do(["plot", *shown, "--plot", f"{out / 'overview'}.png"]))
    (out / "commands.txt").write_text("\n".join(commands) + "\n")
    return status
