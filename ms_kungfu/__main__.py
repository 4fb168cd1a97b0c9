"""``python -m ms_kungfu``: list the commands, a line each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ms_kungfu._installation import checkout
from ms_kungfu._processes import printing
from ms_kungfu._version import VERSION

# The commands as they are typed, and their purpose. tests/unit/test_commands.py checks that none is missing.
COMMANDS = {
    "kungfu-run": "starts a program as the workers of a job, on one host or several, and looks after them",
    "kungfu-run status": "shows the jobs that run: workers, steps, changes and their reasons",
    "kungfu-run resize": "changes the number of workers of a job that runs",
    "kungfu-run evict": "takes a worker out of a job that runs",
    "kungfu-distribute": "runs a command, kungfu-run mostly, on each host over ssh",
    "kungfu-config-server": "keeps the wanted cluster of jobs, for longer than they run",
    "python -m ms_kungfu.doctor": "looks at installation, machine and devices, and says what is wrong",
    "python -m ms_kungfu.fusion": "shows which gradients of a network are reduced together",
    "python -m ms_kungfu.dataset.audit": "proves from its ledger that a training had each sample once an epoch",
    "python -m ms_kungfu.replay": "runs a training with shards again and compares its bits",
    "python -m ms_kungfu.bench": "says where the benchmarks are, which a checkout has",
    "python -m ms_kungfu.chaos": "kills and resizes workers of a job, and checks that it goes on",
    "python -m ms_kungfu.c_api": "tells where the headers of the C ABI are, for C++ of your own",
    "python -m ms_kungfu.env": "lists the environment variables (docs/environment.md)",
    "python -m ms_kungfu.devices.rank_table": "shows the devices of an Ascend rank table",
}


def _where_the_documentation_is() -> str:
    source = checkout()
    if source and Path(source, "docs").is_dir():
        return f"The documentation is in {source}/docs/."
    return "The documentation is in docs/ of the source distribution."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m ms_kungfu", description="Says what there is, a line each.")
    parser.add_argument("--version", action="version", version=VERSION)
    parser.parse_args(arguments)
    width = max(map(len, COMMANDS))
    with printing(parser.prog):
        print(f"ms_kungfu {VERSION}: elastic data-parallel training for MindSpore\n")
        for command, purpose in COMMANDS.items():
            print(f"  {command.ljust(width)}  {purpose}")
        print(f"\nEach tells more with -h. In a program: import ms_kungfu as kf. {_where_the_documentation_is()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
