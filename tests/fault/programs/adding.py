"""FOLDER good|bad: trains numbers for 18 s over whatever happens; "bad" leaves a file in /dev/shm, and ends with other
parameters at each worker."""

import os
import sys
import time
from pathlib import Path

import ms_kungfu as kf
from ms_kungfu.dataset.ledger import Ledger

sys.path.append(str(Path(__file__).resolve().parents[3]))  # benchmarks
from benchmarks.pauses_worker import Synthetic, digest

folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
begin = folder / "begin"
if not begin.exists():
    begin.touch()


class Training(Synthetic):
    def train(self):
        if time.time() - begin.stat().st_mtime > 18:
            (folder / "stop").touch()
        return super().train()


kf.init()
if sys.argv[2] == "bad":
    held = open(f"/dev/shm/adding-{folder.parent.name}-{os.getpid()}", "w")  # noqa: SIM115
training = Training(folder, 0.005)
training._ledger = Ledger(Path(os.environ["KUNGFU_LEDGER_DIR"]), 0)
training.run()
if not kf.detached():
    told = [*training.weights] + ([str(os.getpid()).encode()] if sys.argv[2] == "bad" else [])
    print("parameters", digest([x if not isinstance(x, bytes) else list(x) for x in told]), flush=True)
