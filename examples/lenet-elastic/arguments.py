"""LeNet on handwritten digits, on a cluster that grows and shrinks while it trains. Start it with run-elastic.sh."""

import argparse
import os
from pathlib import Path

import data

from ms_kungfu.elastic.schedule import parse_schedule

HERE = Path(__file__).parent


def schedule(text):
    if text != "none":
        try:
            parse_schedule(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_arguments(words=None):
    # run-elastic.sh searches for some of these arguments by their full names.
    parser = argparse.ArgumentParser(prog="train.py", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--schedule", type=schedule, default="60:2,140:4,300:1", help="step:size,... or none (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--until",
        type=float,
        metavar="TIME",
        help="end with the epoch that runs at this time, in the format of date +%%s",
    )
    parser.add_argument("--global-batch-size", type=int, default=32, help="samples of all workers in a step")
    parser.add_argument(
        "--shards", type=int, default=0, metavar="S",
        help="partition each step into S shards: the same bits on any cluster (default: 0, one part per worker)",
    )  # fmt: skip
    parser.add_argument("--learning-rate", type=float, default=0.02, help="initial rate; it falls to 0 along a cosine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--data-path", default=os.environ.get("DATA_PATH"), help="MNIST's IDX files (default: DATA_PATH, else digits)"
    )
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="folder for the results (default: out next to this file)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="write a checkpoint every 20 steps to this folder"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint there, if any")
    parser.add_argument(
        "--ledger",
        type=Path,
        metavar="DIR",
        help="record trained samples in this folder; see python -m ms_kungfu.dataset.audit",
    )
    args = parser.parse_args(words)
    if args.shards and args.global_batch_size % args.shards:
        parser.error(f"--shards {args.shards} doesn't divide --global-batch-size {args.global_batch_size}")
    return args


def shards_for(args):
    """Return the largest number of workers in the schedule, or the next larger number that divides the batch."""
    if args.shards or args.schedule == "none":
        return args.shards
    largest = max(int(entry.split(":")[1]) for entry in args.schedule.split(","))
    return next((n for n in range(largest, args.global_batch_size + 1) if args.global_batch_size % n == 0), 0)


if __name__ == "__main__":
    # Exits with a message if the arguments are invalid; run-elastic.sh runs this first.
    given = parse_arguments()
    if given.data_path:
        data.find_or_make(given.data_path, HERE / "data")
    print(shards_for(given))
