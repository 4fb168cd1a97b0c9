"""Runs schedules by hand, and tells the story of the first that breaks a promise."""

from __future__ import annotations

import argparse
import sys
import time

from tests.fault.schedules import schedule_of, schedule_of_hosts, schedule_of_leadership, shrunk, story, violation_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.simulate", description=__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int, nargs="?", default=1, help="how many (default 1)")
    parser.add_argument("--all", action="store_true", help="go on after a broken promise, and only name it")
    parser.add_argument("--story", action="store_true", help="tell what happens, also where all is well")
    parser.add_argument("--hosts", action="store_true", help="jobs over several hosts")
    parser.add_argument(
        "--leadership", action="store_true", help="the same, and the controller moves from host to host"
    )
    args = parser.parse_args()
    schedules = schedule_of_leadership if args.leadership else schedule_of_hosts if args.hosts else schedule_of
    begin = time.monotonic()
    for seed in range(args.first, args.first + args.count):
        schedule = schedules(seed)
        violation = violation_of(schedule)
        if violation is not None and args.all:
            print(f"seed {seed}: {str(violation).splitlines()[0][:200]}")
        elif violation is not None:
            print(f"seed {seed}: {violation}\n\nshrunk:\n{story(shrunk(schedule))}")
            return 1
        if args.story:
            print(f"seed {seed}\n{story(schedule)}")
    print(f"{args.count} schedules in {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
