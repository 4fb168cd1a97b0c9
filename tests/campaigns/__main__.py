"""Runs one campaign: random trials, a sweep or a soak, too long or too random for ``.ci/run``.

    python -m tests.campaigns list
    python -m tests.campaigns kills --count 1000 --seed 7

What else a campaign understands follows: ``python -m tests.campaigns histories --count 5 --net resnet``. The last line
printed is a row for docs/results.md: date, commit, machine, command, figure.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import build_cpp

ROOT = Path(__file__).resolve().parents[2]
# What a campaign starts: its command, and what it adds to the environment.
Start = tuple[list[str], dict[str, str]]


@dataclass(frozen=True)
class Campaign:
    what: str
    unit: str  # what --count counts
    count: int  # without --count
    start: Callable[[int, int], Start] = field(repr=False)  # of --count and --seed
    seeded: bool = True


def module(name: str, *words: str) -> Callable[[int, int], Start]:
    """``python -m NAME``, where ``{count}`` and ``{seed}`` in the words become numbers."""

    def start(count: int, seed: int) -> Start:
        return [sys.executable, "-m", name, *(word.format(count=count, seed=seed) for word in words)], {}

    return start


def faults(name: str) -> Callable[[int, int], Start]:
    """A campaign of `tests.campaigns.driver`."""
    return module("tests.campaigns.driver", name, "--count", "{count}", "--seed", "{seed}")


def tests(*words: str, **variables: str) -> Callable[[int, int], Start]:
    """pytest with these words and variables of the environment."""

    def start(count: int, seed: int) -> Start:
        filled = [word.format(count=count, seed=seed) for word in words]
        environment = {name: value.format(count=count, seed=seed) for name, value in variables.items()}
        return [sys.executable, "-m", "pytest", "--all", "-p", "no:cacheprovider", *filled], environment

    return start


def cpp(pattern: str, *words: str, **variables: str) -> Callable[[int, int], Start]:
    """The C++ tests that the pattern selects, in one process."""

    def start(count: int, seed: int) -> Start:
        filled = [word.format(count=count, seed=seed) for word in words]
        environment = {name: value.format(count=count, seed=seed) for name, value in variables.items()}
        return [str(build_cpp() / "tests" / "cpp" / "kungfu_tests"), f"--gtest_filter={pattern}", *filled], environment

    return start


CAMPAIGNS = {
    "simulated-jobs": Campaign(
        "jobs on one host, on a virtual clock", "jobs", 10_000, module("tests.fault.simulate", "{seed}", "{count}")
    ),
    "simulated-hosts": Campaign(
        "jobs over several hosts, on a virtual clock", "jobs", 2000,
        module("tests.fault.simulate", "{seed}", "{count}", "--hosts"),
    ),
    "simulated-heads": Campaign(
        "jobs whose head node changes, on a virtual clock", "jobs", 2000,
        module("tests.fault.simulate", "{seed}", "{count}", "--leadership"),
    ),
    "kills": Campaign("kills and resizes of real jobs on one host", "processes to kill", 1000, faults("kills")),
    "kills-on-hosts": Campaign(
        "kills and resizes of real jobs whose launchers play four hosts", "processes to kill", 200,
        faults("kills-on-hosts"),
    ),
    "faults": Campaign(
        "scripted faults at marked places of the runtime, in real jobs", "scripts", 300, faults("faults")
    ),
    "histories": Campaign(
        "trainings in shards that end with the bits of one worker", "histories", 200, faults("histories")
    ),
    "host-kills": Campaign(
        "workers killed in jobs over network namespaces; needs root", "workers to kill", 200, faults("host-kills")
    ),
    "host-losses": Campaign(
        "hosts killed, cut off or paused in network namespaces; needs root", "hosts to lose", 50, faults("host-losses")
    ),
    "host-changes": Campaign(
        "hosts that join, leave and fail among kills and resizes", "any: it plays one job", 1,
        tests("-s", "tests/multiprocess/test_hosts_coming_and_going.py::"
              "test_hosts_come_and_go_at_random_among_deaths_and_resizes", KUNGFU_TEST_SEED="{seed}"),
    ),
    "heads": Campaign(
        "leader election after the head's launcher, host or rank 0 fails; needs etcd", "failures of each kind", 20,
        faults("heads"),
    ),
    "stores": Campaign(
        "writers, readers and faults of the config server and etcd", "schedules of each store", 100,
        tests("tests/engines/test_store_contract.py", "-k", "test_schedules_of_a_few_writers",
              KUNGFU_STORE_SCHEDULES="{count}", KUNGFU_STORE_SEED="{seed}"),
    ),
    "strangers": Campaign(
        "random messages of unauthenticated clients to launchers and config server", "connections to each", 100_000,
        tests("tests/multiprocess/test_strangers_at_random.py", KUNGFU_FUZZ="{count}", KUNGFU_FUZZ_SEED="{seed}"),
    ),
    "cpp-strangers": Campaign(
        "frames and requests at random, to the inter-host transport", "of each kind", 100_000,
        cpp("Strange*", KUNGFU_FUZZ="{count}", KUNGFU_KILL_SEED="{seed}"),
    ),
    "cpp-deaths": Campaign(
        "a rank killed or frozen at each marked place of the runtime, and two at random", "any: all places", 1,
        cpp("Recovery.*:ShardsFailures.*:ClusterFailures.*", KUNGFU_KILL_EVERYWHERE="1", KUNGFU_KILL_SEED="{seed}"),
    ),
    "cpp-again": Campaign(
        "the C++ tests again and again, in random order", "repetitions", 20,
        cpp("-*Time.*", "--gtest_repeat={count}", "--gtest_shuffle", "--gtest_random_seed=0",
            KUNGFU_KILL_SEED="{seed}"),
    ),
    "cpp-aarch64": Campaign(
        "the C++ tests on an emulated aarch64", "any: all tests", 1,
        lambda count, seed: (["tests/cpp/aarch64.sh"], {"KUNGFU_KILL_SEED": str(seed)}),
    ),
    "properties": Campaign(
        "the property tests with random examples", "examples of each", 10_000,
        tests("tests/unit", "-k", "sharding or ledger or placing or shards", "--hypothesis-profile=campaign",
              "--hypothesis-seed={seed}", KUNGFU_EXAMPLES="{count}"),
    ),
    "mutants": Campaign(
        "the quick suite's tests against the code with one mistake at a time", "any: all mutants", 1,
        module("tests.campaigns.mutants"), seeded=False,
    ),
    "programs": Campaign(
        "other people's programs, on one device and through kills and resizes", "runs of each", 3,
        module("tests.programs", "--seeds", "{count}"), seeded=False,
    ),
    "soak": Campaign(
        "LeNet with a kill or a resize every few seconds", "seconds", 600,
        tests("-s", "tests/fault/test_soak.py", KUNGFU_SOAK_SECONDS="{count}"), seeded=False,
    ),
}  # fmt: skip


def machine() -> str:
    """The processor and the number of cores that this process may use."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{models[0] if models else os.uname().machine}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip() or "no git"


def row(command: str, figure: str) -> str:
    """One line of the table in docs/results.md."""
    return f"| {datetime.date.today()} | {commit()} | {machine()} | `{command}` | {figure} |"


def run(name: str, count: int | None, seed: int | None, more: Sequence[str] = ()) -> int:
    """Run a campaign, print what it prints and then its row, and return its exit status."""
    campaign = CAMPAIGNS[name]
    count = campaign.count if count is None else count
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    command = f"python -m tests.campaigns {name} --count {count}{f' --seed {seed}' if campaign.seeded else ''}"
    command = shlex.join([*command.split(), *more])
    words, environment = campaign.start(count, seed)
    words += more
    print(command, "->", *(f"{k}={v}" for k, v in environment.items()), shlex.join(words), flush=True)
    figure = "nothing was printed"
    with subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            figure = line.strip("= \n") or figure
    failed = "" if process.returncode == 0 else f"FAILED (exit status {process.returncode}): "
    print(row(command, failed + figure))
    return process.returncode


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=["list", *CAMPAIGNS], metavar="NAME", help="a campaign; `list` shows them")
    parser.add_argument("--count", type=int, help="how many; each campaign has a default")
    parser.add_argument("--seed", type=int, help="of the trials (default: random, printed)")
    args, more = parser.parse_known_args(words)
    if args.name == "list":
        for name, each in CAMPAIGNS.items():
            print(f"{name:16} {each.what} (--count: {each.unit}, default {each.count})")
        return 0
    if args.seed is not None and not CAMPAIGNS[args.name].seeded:
        parser.error(f"--seed {args.seed}: {args.name} has no seed; leave --seed out")
    if args.count is not None and args.count < 1:
        parser.error(f"--count {args.count}: at least 1")
    return run(args.name, args.count, args.seed, more)


if __name__ == "__main__":
    sys.exit(main())
