"""Train examples/lenet-elastic on a Ray cluster from Python: with one worker, and up to four as the cluster grows."""

import sys
from pathlib import Path

import ms_kungfu.ray

TRAIN = Path(__file__).resolve().parents[1] / "lenet-elastic" / "train.py"

if __name__ == "__main__":
    # Pass further arguments to the program, for example: --epochs 4 --ledger ledger
    ms_kungfu.ray.run(["python", str(TRAIN), "--schedule", "none", *sys.argv[1:]], num_workers=(1, 4))
