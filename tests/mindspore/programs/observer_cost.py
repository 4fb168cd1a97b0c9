"""ROUNDS SECONDS: what the event log and the live page take of a LeNet step with two workers, interleaved.

Each round runs the same job three times: without an event log, with one, and with one and a page that a client reads.
Prints the medians of the rounds: milliseconds of a step, CPU time of the job, and the shares of it that the launcher
and the workers' reports take.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))  # benchmarks
KINDS = ("no log", "event log", "event log and page")


def train(seconds: float) -> None:
    """Train. Print "begins" after 50 steps, and after so many seconds the steps and this worker's CPU times."""
    import mindspore as ms
    import numpy as np

    import ms_kungfu as kf
    from benchmarks.contenders._training import training_step
    from ms_kungfu.elastic import ElasticTraining
    from ms_kungfu.elastic.statistics import StepStatistics

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    step = training_step("KungFuMomentum")
    reporting, report = [0.0], StepStatistics._report

    def timed_report(self):
        began = time.thread_time()
        report(self)
        reporting[0] += time.thread_time() - began

    StepStatistics._report = timed_report
    random = np.random.default_rng(1)
    image = ms.Tensor(random.standard_normal((16, 1, 28, 28)).astype(np.float32))
    label = ms.Tensor(random.integers(0, 10, 16).astype(np.int32))
    elastic = ElasticTraining(step.network, step.optimizer)
    elastic.begin()
    steps = -50
    while True:
        elastic.step_end(step(image, label), 16)
        steps += 1
        if steps == 0:
            reporting[0], cpu, began = 0.0, time.process_time(), time.perf_counter()
            print("begins", flush=True)
        # All workers end with the same step.
        if steps > 0 and steps % 50 == 0:
            took = time.perf_counter() - began
            if kf.comm.all_reduce(np.float32(took), op="max", name="took") >= seconds:
                break
    print(f"ends {steps} {took} {time.process_time() - cpu} {reporting[0]}", flush=True)
    elastic.end()


def cpu_s(process: int) -> float:
    """Return the CPU seconds of the process's living threads."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def read_page(url: str) -> None:
    with urllib.request.urlopen(url.partition("#")[0] + "events") as stream:
        for _ in stream:
            pass


def measure(kind: str, seconds: float) -> tuple[float, float, float, float]:
    """Return seconds of a step, CPU seconds of the job, and those of the launcher and the reports in it."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["-np", "2", "-prefix", "none"]
        flags += ["-logdir", folder] if kind != "no log" else []
        flags += ["-dashboard"] if kind == "event log and page" else []
        command = [sys.executable, "-m", "ms_kungfu.launcher", *flags, sys.executable, __file__, "train", str(seconds)]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert job.stdout is not None
        began, ends = None, []
        for line in job.stdout:
            if found := re.search(r"dashboard: url=(\S+)", line):
                threading.Thread(target=read_page, args=(found[1],), daemon=True).start()
            if line.startswith("begins") and began is None:
                began = cpu_s(job.pid)
            if line.startswith("ends"):
                ends.append([float(word) for word in line.split()[1:]])
                if len(ends) == 1:
                    launcher = cpu_s(job.pid)
        if job.wait() or began is None or len(ends) != 2:
            raise SystemExit(f"the job with {kind} failed")
    launcher -= began
    workers, reports = sum(end[2] for end in ends), sum(end[3] for end in ends)
    return ends[0][1] / ends[0][0], workers + launcher, launcher, reports


def main(rounds: int, seconds: float) -> None:
    found: dict[str, list[tuple[float, float, float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind in KINDS:
            found[kind].append(measure(kind, seconds))
    for kind, rows in found.items():
        step, job = statistics.median(row[0] for row in rows), statistics.median(row[1] for row in rows)
        launcher, reports = (100 * statistics.median(row[n] / row[1] for row in rows) for n in (2, 3))
        ratio = statistics.median(row[0] / plain[0] for row, plain in zip(rows, found[KINDS[0]]))
        print(
            f"{kind}: step {step * 1e3:.2f} ms ({ratio:.3f} of the first), CPU {job:.1f} s, "
            f"launcher {launcher:.3f} %, reports {reports:.3f} %",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(float(sys.argv[2]))
    else:
        main(int(sys.argv[1]), float(sys.argv[2]))
