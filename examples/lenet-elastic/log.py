"""Rank 0's training log: a JSON line per step, and a progress bar or plain lines."""

import json
import os
import sys
import time

import numpy as np
from mindspore.train import Callback

import ms_kungfu as kf


class EndAt(Callback):
    """End training on all workers after the epoch in which any worker reaches a time (in seconds since 1970)."""

    def __init__(self, when):
        super().__init__()
        self._when = when

    def on_train_epoch_end(self, run_context):
        if kf.detached():
            return
        is_over = np.array([time.time() >= self._when], dtype=np.int32)
        if kf.comm.all_reduce(is_over, op="max", name="is over")[0]:
            run_context.request_stop()


class TrainingLog(Callback):
    """Write one object per step to `path`.

    Put this callback before the elastic callback, so that it sees the cluster size of the step. The loss is the mean
    over all workers' samples, which needs one small all-reduce.
    """

    def __init__(self, path, learning_rate, steps):
        super().__init__()
        self._path = path
        self._learning_rate = learning_rate  # of each step
        self._steps = steps
        self._file = None
        self._bar = None
        self._size = 0
        self._last = 0.0

    def state_dict(self):
        """Return nothing: the clock and the last shown values belong to one process. A joining worker needs neither."""
        return {}

    def load_state_dict(self, state):
        pass

    def on_train_begin(self, run_context):
        self._last = time.perf_counter()

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        samples = params.train_dataset.weight
        own = np.array([float(params.net_outputs.asnumpy()) * samples, samples], dtype=np.float64)
        total, samples = kf.comm.all_reduce(own, op="sum", name="loss")
        loss = total / max(samples, 1)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if kf.current_rank() == 0:  # this can be another worker than before, if the former rank 0 has failed
            step, size = params.cur_step_num, kf.current_cluster_size()
            if self._file is None:
                self._open(step)
            line = {
                "step": step,
                "loss": round(loss, 6),
                "cluster_size": size,
                "learning_rate": round(self._learning_rate[min(step, len(self._learning_rate)) - 1], 6),
                "seconds": round(seconds, 4),
            }
            self._file.write(json.dumps(line) + "\n")
            self._show(step, loss, size)

    def on_train_end(self, run_context):
        if self._file is not None:
            self._file.close()
        if self._bar is not None:
            self._bar.close()

    def _open(self, first_step):
        """Open the file. Keep the lines of earlier steps if training resumes, or if the last writer has failed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if first_step > 1 and self._path.exists():
            lines = self._path.read_text().splitlines(True)
            # A worker that was killed while writing left an incomplete last line.
            kept = [line for line in lines if line.endswith("}\n") and json.loads(line)["step"] < first_step]
        self._file = self._path.open("w", buffering=1)
        self._file.writelines(kept)
        self._bar = _progress_bar(self._steps, first_step - 1)

    def _show(self, step, loss, size):
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, workers {size}", refresh=False)
            self._bar.update()
        elif step % 20 == 0 or size != self._size or step == self._steps:
            print(f"step {step:4d} of {self._steps}  loss {loss:6.4f}  workers {size}", flush=True)
        self._size = size


def _progress_bar(steps, done):
    """Return a bar on a terminal, else None.

    Under kungfu-run a worker writes to a pipe; run-elastic.sh passes the width.
    """
    width = os.environ.get("PROGRESS_BAR_WIDTH", "")
    if not (sys.stderr.isatty() or width.isdigit()):
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    form = "{percentage:3.0f}% {bar} {n_fmt}/{total_fmt}{postfix}"
    return tqdm(total=steps, initial=done, ncols=int(width or 80), bar_format=form)
