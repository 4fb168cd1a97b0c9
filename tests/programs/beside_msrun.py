"""``python -m tests.programs.beside_msrun [MODEL]``: one program under MindSpore's msrun and under ``kungfu-run
--msrun``, two workers on the same cores, in turn; prints the samples a second of both."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import launcher
from tests.ports import free_port
from tests.programs.__main__ import MINDCV, install
from tests.programs.running import HERE, Command, accuracy

MODELS = {"lenet": ("lenet", 400), "mobilenet": ("mobilenet_v1_025", 60)}


def rate(starter: Sequence[str], command: Command, limit_s: float) -> float | None:
    """None where it doesn't come to its end."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        done = subprocess.Popen(
            [*starter, *command.arguments],
            cwd=folder, env=command.environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = done.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, 9)
            done.wait()
            return None
        if status:
            print(Path(log.name).read_text()[-3000:], file=sys.stderr)
            return None
        return accuracy(Path(folder), r"rate: (\S+)")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.beside_msrun", description=__doc__)
    parser.add_argument("model", nargs="?", choices=MODELS, default="lenet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="of one run")
    given = parser.parse_args()
    name, steps = MODELS[given.model]
    file = str(HERE / "speed_msrun.py")
    command = Command(HERE / "speed_msrun.py", [name, str(steps)], [] if name == "lenet" else install(MINDCV))
    rates: dict[str, list[float | None]] = {"msrun": [], "kungfu-run --msrun": []}
    for _ in range(given.rounds):
        theirs = [
            "msrun",
            "--worker_num=2",
            "--local_worker_num=2",
            f"--master_port={free_port()}",
            "--join=True",
            file,
        ]
        ours = [launcher(), "-q", "--msrun", "-np", "2", sys.executable, file]
        rates["msrun"].append(rate(theirs, command, given.limit))
        rates["kungfu-run --msrun"].append(rate(ours, command, given.limit))
    for starter, found in rates.items():
        ended = [each for each in found if each is not None]
        middle = f"{statistics.median(ended):.0f} samples/s" if ended else "none came to its end"
        print(f"{given.model} under {starter}: {middle} ({found})")


if __name__ == "__main__":
    main()
