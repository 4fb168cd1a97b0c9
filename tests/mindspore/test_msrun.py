"""``kungfu-run --msrun``: a program for msrun with no line changed, on a cluster that changes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_kungfu.dataset import audit
from tests.conftest import launcher, long
from tests.ports import free_port

PROGRAM = Path(__file__).parents[1] / "programs" / "like_mindcv.py"
LOOPS = Path(__file__).with_name("programs") / "msrun_loops.py"
STEPS = 53  # of an epoch: 1280 samples, 3 times 8 a step, what is left is dropped
GRADIENTS = LOOPS.with_name("msrun_gradients.py")
LIMIT_S = 240
HANGS_S = 600  # a whole run of a loop, also where others have the cores
pytestmark = pytest.mark.timeout(900)  # several runs a test, each of several processes


class Job:
    """The program under ``kungfu-run --msrun``, with a world of three."""

    def __init__(self, folder: Path, size: int, epochs: int, *options: str, flags: tuple[str, ...] = ()) -> None:
        self.folder = folder
        folder.mkdir()
        self.url = f"http://127.0.0.1:{free_port()}/config"
        port = self.url.split(":")[2].split("/")[0]
        command = [launcher(), "-w", "-builtin-config-port", port, "-config-server", self.url, "--msrun"]
        command += [
            "-msrun-size",
            "3",
            "-np",
            str(size),
            *flags,
            sys.executable,
            str(PROGRAM),
            str(folder),
            str(epochs),
        ]
        self.log = folder / "log"
        environment = {**os.environ, "KUNGFU_LEDGER_DIR": str(folder / "ledger")}
        self.process = subprocess.Popen(
            [*command, *options],
            cwd=folder, env=environment, stdout=self.log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def resize(self, size: int) -> None:
        command = [launcher(), "resize", str(size), "-config-server", self.url]
        subprocess.run(command, check=True, timeout=LIMIT_S)

    def wait(self, until) -> None:
        """Lets it train a step at a time as long as that isn't so."""
        end = time.monotonic() + LIMIT_S
        while not until():
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            assert time.monotonic() < end, self.log.read_text()[-6000:]
            time.sleep(0.05)

    def pace(self, step: int) -> None:
        """No further than this step."""
        (self.folder / "new").write_text(str(step))
        (self.folder / "new").rename(self.folder / "pace")

    def pace_until(self, until) -> None:
        """A step at a time."""

        def further() -> bool:
            last = self.last_step()
            if until():
                return True
            self.pace(last + 1)
            return False

        self.wait(further)

    def last_step(self) -> int:
        return max((int(rows[-1][0]) for rows in self.steps().values() if rows), default=0)

    def steps(self) -> dict[int, list[list[str]]]:
        """By process: step, epoch, steps of the epoch and loss."""
        paths = self.folder.glob("steps.*")
        return {
            int(path.suffix[1:]): [line.split(maxsplit=3) for line in path.read_text().splitlines()] for path in paths
        }

    def epochs(self) -> dict[int, set[float]]:
        """By epoch the accuracies that the workers found."""
        found: dict[int, set[float]] = {}
        for path in self.folder.glob("epochs.*"):
            for row in map(json.loads, path.read_text().splitlines()):
                found.setdefault(row["epoch"], set()).add(row["accuracy"])
        return found

    def played(self) -> dict[int, set[int]]:
        """By step the virtual rank of the worker that stood for the last one."""
        found: dict[int, set[int]] = {}
        for path in self.folder.glob("played.*"):
            for step, rank in (map(int, line.split()) for line in path.read_text().splitlines()):
                found.setdefault(step, set()).add(rank)
        return found

    def finish(self) -> None:
        self.pace(10**9)
        assert self.process.wait(LIMIT_S) == 0, self.log.read_text()[-6000:]

    def audit(self) -> audit.Report:
        return audit.audit(*audit.read(self.folder / "ledger"))


def losses(job: Job) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for rows in job.steps().values():
        for step, _, _, loss in rows:
            found.setdefault(int(step), set()).add(loss)
    return found


def grow_and_kill(job: Job, workers_in_the_end: int = 2) -> None:
    """1 -> 3 -> the first one is killed."""
    job.pace(0)
    job.wait(lambda: len(list(job.folder.glob("started.*"))) == 1)
    (first,) = (int(path.suffix[1:]) for path in job.folder.glob("started.*"))
    job.resize(3)
    job.wait(lambda: job.log.read_text().count("worker ready: ") == 2)
    job.pace_until(lambda: len(job.steps()) == 3)
    os.kill(first, signal.SIGKILL)
    if workers_in_the_end == 3:
        job.wait(lambda: job.log.read_text().count("worker ready: ") == 3)
        job.pace_until(lambda: len(job.steps()) == 4)
    job.finish()


def check_that_they_trained_the_same(elastic: Job, alone: Job, epochs: int) -> None:
    assert losses(elastic) == losses(alone)
    assert set(losses(elastic)) == set(range(1, epochs * STEPS + 1))
    assert all(len(found) == 1 for found in elastic.epochs().values()), "workers found other accuracies"
    assert elastic.epochs() == alone.epochs()
    assert min(alone.epochs()[epochs]) > 0.8
    report = elastic.audit()
    assert report.exact, report


def test_mindcvs_calls_train_the_same_bits_while_the_cluster_changes(tmp_path):
    """No line of the program is about elasticity; V shards a step are V shards, whichever workers compute them."""
    with Job(tmp_path / "elastic", 1, 3, "paced", "summed") as elastic:
        grow_and_kill(elastic)
    with Job(tmp_path / "alone", 1, 3) as alone:
        alone.finish()
    assert "reduced twice" not in elastic.log.read_text()
    played = elastic.played()
    assert set(played) == set(range(1, 3 * STEPS + 1))
    assert played[1] == {0}, "one stands for all"
    assert played[3 * STEPS] == {2}
    assert all(len(each) == 1 for each in played.values()), "workers were sent another one's"
    check_that_they_trained_the_same(elastic, alone, 3)


@pytest.mark.long
def test_rank_0_is_played_again_and_gradients_are_summed(tmp_path):
    with Job(tmp_path / "elastic", 1, 2, "paced", "sum", flags=("-recover", "replace")) as elastic:
        grow_and_kill(elastic, workers_in_the_end=3)
    with Job(tmp_path / "alone", 1, 2, "sum") as alone:
        alone.finish()
    with Job(tmp_path / "mean", 1, 2) as mean:  # at three times the rate
        mean.finish()
    check_that_they_trained_the_same(elastic, alone, 2)
    first = [[float(min(losses(job)[step])) for step in range(1, 21)] for job in (alone, mean)]
    assert first[0] == pytest.approx(first[1], rel=1e-3)
    assert (elastic.folder / "epoch-2.ckpt").exists(), "who took the place of rank 0 writes for it"


@pytest.mark.long
def test_a_training_cell_that_clips_trains_on_two_workers(tmp_path):
    """Its own steps are no shards: each worker has its part of the global batch, and moving statistics of that."""
    with Job(tmp_path / "two", 2, 2, "clip", "guarded") as two:
        two.finish()
    assert len(two.steps()) == 2
    assert {len(rows) for rows in two.steps().values()} == {2 * STEPS}
    assert all(len(found) == 1 for found in two.epochs().values()), two.epochs()
    assert min(two.epochs()[2]) > 0.8
    report = two.audit()
    assert report.exact, report
    assert [path.name for path in sorted(two.folder.glob("guarded*.ckpt"))] == [
        f"guarded-1_{STEPS}.ckpt",
        f"guarded-2_{STEPS}.ckpt",
    ]


SENTENCES = {
    "semi_auto": "parallel_mode='semi_auto_parallel' isn't supported",
    "optimizer_parallel": r"set_auto_parallel_context\(enable_parallel_optimizer=True\) isn't supported",
    "pipeline": r"set_auto_parallel_context\(pipeline_stages=2\) isn't supported",
    "device_num": "device_num=2 differs from -msrun-size, which sets 3 ranks",
    "group": "only the group of all ranks is supported",
    "unknown_group": "group 'nobody' isn't supported",
    "prod": r"AllReduce\('prod'\) isn't supported",
    "gather": "ops.AllGather isn't supported",
    "barrier": "ops.Barrier isn't supported",
    "root": "rank 3 is out of range: -msrun-size sets 3 ranks",
    "scatter": "comm_func.reduce_scatter_tensor isn't supported",
    "send": "ops.Send isn't supported",
    "auto_parallel": "AutoParallel isn't supported",
    "mint": "mint.distributed.all_reduce isn't supported",
    "mint_init": "mint.distributed.init_process_group isn't supported",
    "ops_communication": "ops.communication.all_reduce isn't supported",
    "ops_all_reduce": "ops.communication.all_reduce isn't supported",
    "evaluation": "evaluation on a dataset in 2 shards isn't supported",
    "stand_alone": "the Model's network doesn't reduce gradients",
    "loop": "a loop over a sharded dataset in a program without a gradient reducer isn't supported",
    "copied": "a custom training loop with a Dense that was created by copy.deepcopy or similar isn't supported",
    "second": "a second sharded dataset in a training loop isn't supported",
    "two_sizes": "training on a dataset in 2 shards isn't supported",
    "unsharded": "training on a dataset that is not sharded isn't supported",
    "one_shard": "training on a dataset that is not sharded isn't supported",
    "unbatched": r"training on a dataset without batch\(\) isn't supported",
    "per_batch_map": r"batch\(per_batch_map=...\) with a function that uses 'get_rank' isn't supported",
    "partial_map": r"batch\(per_batch_map=...\) with a function that uses 'rank' isn't supported",
    "python_sampler": "training on this dataset isn't supported .* a custom sampler draws",
    "filter": "training on this dataset isn't supported .* FilterDataset changes the set of samples",
}


def test_msrun_query_of_mindspore_is_answered_or_refused_in_a_sentence(tmp_path):
    """Of a program that a shell script starts as a module."""
    script = tmp_path / "start.sh"
    script.write_text(f"cd {PROGRAM.parents[1] / 'mindspore' / 'programs'} && exec {sys.executable} -m msrun_asks\n")
    done = subprocess.run(
        [launcher(), "-q", "--msrun", "-msrun-size", "3", "-np", "1", "sh", str(script)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert "all asked" in done.stdout
    said = dict(re.findall(r"^(\w+): (.*)$", done.stdout, flags=re.MULTILINE))
    assert {name for name, sentence in SENTENCES.items() if not re.search(sentence, said.get(name, ""))} == set(), said


class Looping:
    """A loop of one's own in a world of three, which the fixture `kungfu_run` ends if the test doesn't."""

    def __init__(self, kungfu_run, folder: Path, size: int, *words: object, program: Path = LOOPS, world: int = 3):
        self.ledger, port = folder / "ledger", free_port()
        self.url = f"http://127.0.0.1:{port}/config"
        command = ["-w", "-builtin-config-port", port, "-config-server", self.url, "--msrun", "-msrun-size", world]
        self.program = kungfu_run(
            *command, "-np", size, sys.executable, program, *words, environment={"KUNGFU_LEDGER_DIR": str(self.ledger)}
        )

    def until(self, pattern: str) -> re.Match[str]:
        return self.program.wait_for(pattern, timeout=HANGS_S)[0]

    def resize(self, size: int) -> None:
        command = [launcher(), "resize", str(size), "-config-server", self.url]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.program.runtime_dir)}
        subprocess.run(command, env=environment, check=True, timeout=LIMIT_S)

    def end(self, code: int = 0) -> str:
        self.program.assert_exit(code, HANGS_S)
        return self.program.output

    def passes(self) -> dict[int, list[tuple[int, int, int, str]]]:
        """By epoch: rank, steps, how many were there, weights."""
        found: dict[int, list[tuple[int, int, int, str]]] = {}
        pattern = r"^rank (\d) epoch (\d+) steps (\d+) there (\d) weights (\w+)$"
        for rank, epoch, steps, there, weights in re.findall(pattern, self.program.output, flags=re.MULTILINE):
            found.setdefault(int(epoch), []).append((int(rank), int(steps), int(there), weights))
        return found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "break", "limit", "queued", "rank0"])
def test_a_loop_that_counts_its_batches_grows_between_its_passes(kind, tmp_path, kungfu_run):
    """It reduces something every fifth batch, where a worker that came within a pass would wait alone."""
    looping = Looping(kungfu_run, tmp_path, 1, kind, 12, 0.15)
    looping.until("^rank 0 epoch 1 ")
    looping.resize(3)
    victim = int(looping.until(r"worker ready: worker 2 \(.*pid (\d+)\)")[1])
    joined = int(looping.until(r"^rank 2 epoch (\d+) steps [1-9]")[1])
    os.kill(victim, signal.SIGKILL)
    looping.end()
    steps = 8 if kind in ("break", "limit") else 12
    passes = looping.passes()
    assert sorted(passes) == list(range(12))
    for epoch, told in passes.items():
        those = [each for each in told if each[1] > 0]  # the others pass by
        assert len({weights for *_, weights in those}) == 1, told
        if epoch == joined:
            assert {(rank, count) for rank, count, *_ in those} == {(0, steps), (1, steps), (2, steps)}
        assert all(count in (steps, steps + 1) for _, count, *_ in those), told  # what a dead one took is trained again
        assert {there for _, _, there, _ in those} == {3}, "it stands for all ranks"
    assert "Error" not in looping.program.output
    report = audit.audit(*audit.read(looping.ledger))
    assert report.exact == (steps == 12), audit.to_text(report)
    assert not any(epoch.repeated for epoch in report.epochs)


@pytest.mark.long
def test_a_broadcast_is_the_next_ones_where_its_player_dies(tmp_path, kungfu_run):
    looping = Looping(kungfu_run, tmp_path, 3, "broadcast", 3, 0)
    looping.end()
    told = re.findall(r"^rank (\d) told (\d) (\d+) (\d)$", looping.program.output, flags=re.MULTILINE)
    by_step: dict[tuple[int, int], set[str]] = {}
    for _, epoch, number, value in told:
        by_step.setdefault((int(epoch), int(number)), set()).add(value)
    assert by_step[1, 2] == {"0"}
    assert by_step[1, 3] == {"1"}, "one answer, of the lowest that lives"
    assert all(len(values) == 1 for values in by_step.values())


@pytest.mark.parametrize("kind", ["generator", long("zip")])
def test_loop_over_unsharded_data_is_an_error(kind, tmp_path, kungfu_run):
    said = Looping(kungfu_run, tmp_path, 1, kind, 1, 0).end(1)
    assert "a loop that trains with a dataset that isn't sharded isn't supported under kungfu-run --msrun" in said


@pytest.mark.parametrize("cases", ["few", pytest.param("all", marks=pytest.mark.long)])
def test_gradients_of_any_loss_are_those_of_all_ranks(cases, tmp_path, kungfu_run):
    """Sums and scaled losses too, on 1 and 2 workers, "all" on 4, too: the mean over the ranks' batches, as in one
    process."""
    sizes = [1, 2, 4] if cases == "all" else [1, 2]
    looping = Looping(kungfu_run, tmp_path, 1, cases, program=GRADIENTS, world=sizes[-1])
    rows = [4 * sizes[-1] // size for size in sizes]
    for before, size in zip(rows, sizes[1:]):
        looping.until(f"^{before} rows, ")
        looping.resize(size)
    said = looping.end()
    pattern = r"^(16|8|4) rows, (\w+ \w+ \w+): (\S+) (\S+)$"
    norms: dict[str, dict[int, set[tuple[float, float]]]] = {}
    for count, name, norm, alone in re.findall(pattern, said, flags=re.MULTILINE):
        norms.setdefault(name, {}).setdefault(int(count), set()).add((float(norm), float(alone)))
    assert len(norms) == (24 if cases == "all" else 3)
    assert {name for name, found in norms.items() if set(found) != set(rows)} == set()
    wrong = {
        (name, count, norm, alone)
        for name, found in norms.items()
        for count, pairs in found.items()
        for norm, alone in pairs
        if norm != pytest.approx(alone, rel=1e-4)
    }
    assert wrong == set()


def test_a_gradient_that_is_not_made_rank_by_rank_is_refused(tmp_path, kungfu_run):
    said = Looping(kungfu_run, tmp_path, 1, "vjp", program=GRADIENTS, world=4).end(1)
    assert "training with gradients that aren't computed separately for each rank isn't supported" in said
    assert "start with -np 4 (the -msrun-size)" in said


@pytest.mark.parametrize(("kind", "told"), [("model", ["evaluated 7"] * 2), long("fit", ["counted 7"])])
def test_an_evaluation_beside_model_train_sees_each_sample_once(kind, told, tmp_path, kungfu_run):
    said = Looping(kungfu_run, tmp_path, 1, kind, 1, 0).end()
    assert re.findall(r"^(?:evaluated|counted) .*$", said, flags=re.MULTILINE) == told
