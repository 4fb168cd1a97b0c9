"""``python -m ms_kungfu``: list the commands, one per line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ms_kungfu._installation import checkout
from ms_kungfu._processes import printing
from ms_kungfu._version import VERSION

# tests/unit/test_commands.py checks that no command is missing.
COMMANDS = {
    "kungfu-run": "starts a program as the workers of a job, on one host or several",
    "kungfu-run status": "shows the running jobs: workers, steps, changes and their reasons",
    "kungfu-run top": "shows one running job live in the terminal: progress, ranks, changes",
    "kungfu-run resize": "changes the number of workers of a running job",
    "kungfu-run evict": "removes a worker from a running job",
    "kungfu-run explain": "describes in sentences what happened in a job, from its event log",
    "kungfu-run report": "writes a report about a job that has ended, from its event log, as a single HTML file",
    "kungfu-run trace": "merges the traces of a job's workers for Perfetto, and shows what took the time",
    "kungfu-distribute": "runs a command, usually kungfu-run, on each host over ssh",
    "kungfu-config-server": "stores the desired cluster of jobs, even while no job runs",
    "python -m ms_kungfu.doctor": "checks installation, machine and devices, and prints remedies",
    "python -m ms_kungfu.fusion": "shows which gradients of a network are reduced together",
    "python -m ms_kungfu.dataset.audit": "proves from a ledger that each sample was trained once per epoch",
    "python -m ms_kungfu.replay": "runs a program with shards again and compares the results bit by bit",
    "python -m ms_kungfu.bench": "prints where the benchmarks are",
    "python -m ms_kungfu.chaos": "kills a job's workers, resizes the job, and checks that the job continues",
    "python -m ms_kungfu.c_api": "prints where the headers of the C ABI are, for C++ programs",
    "python -m ms_kungfu.env": "lists the environment variables (docs/environment.md)",
    "python -m ms_kungfu.devices.rank_table": "shows the devices of an Ascend rank table",
}


def _where_the_documentation_is() -> str:
    source = checkout()
    if source and Path(source, "docs").is_dir():
        return f"The documentation is in {source}/docs/."
    return "The documentation is in docs/ of the source distribution."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m ms_kungfu", description="Lists the commands.")
    parser.add_argument("--version", action="version", version=VERSION)
    parser.parse_args(arguments)
    width = max(map(len, COMMANDS))
    with printing(parser.prog):
        print(f"ms_kungfu {VERSION}: elastic data-parallel training for MindSpore\n")
        for command, purpose in COMMANDS.items():
            print(f"  {command.ljust(width)}  {purpose}")
        print(f"\nEach command has -h. In a program: import ms_kungfu as kf. {_where_the_documentation_is()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
