import asyncio
import os
from types import SimpleNamespace

import pytest

from ms_kungfu import env
from ms_kungfu.launcher.affinity import Shares, allowed_cores, divide, spread
from ms_kungfu.launcher.agent.workers import HostWorkers
from ms_kungfu.launcher.wire.messages import Launch


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 20])
def test_cores_are_divided_evenly_and_completely(cores, workers):
    shares = divide(list(range(cores)), workers)
    assert len(shares) == workers
    counts = [sum(core in share for share in shares) for core in range(cores)]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if workers <= cores:
        assert max(counts) == 1
    else:
        assert max(sizes) == 1


@pytest.mark.parametrize(
    ("cores", "allowed", "given"), [((0, 1), [1], (0, 1)), ((2, 3), [0, 1], ()), ((), [0], ())],
)  # fmt: skip
def test_worker_whose_cores_are_offline_starts_unpinned(cores, allowed, given, caplog, tmp_path):
    started = []
    machine = SimpleNamespace(allowed_cores=lambda: allowed, environ={})
    begin, end = os.pipe()
    guard = SimpleNamespace(
        start=lambda key, environment, cores, *_, **__: started.append(cores), fileno=lambda: begin, close=lambda: None
    )
    output = SimpleNamespace(attach=lambda *_, held: tuple(os.open(os.devnull, os.O_WRONLY) for _ in range(2)))
    environment = {env.SELF.name: "here:1", env.INCARNATION.name: "0", env.STANDBY.name: None}

    claims = SimpleNamespace(extend=lambda cores: None)

    async def start():
        workers = HostWorkers("here", machine, guard, output, {}, False, None, claims, lambda: 0, None, None, None)
        workers.start(Launch(0, "log", 5, False, environment, cores, 1, False))
        workers.close()

    asyncio.run(start())
    os.close(begin)
    os.close(end)
    assert started == [given]
    told = "worker unpinned: rank=5 host=here cpus=2,3 allowed=0,1" in caplog.text
    assert told == bool(cores and not given)


def test_neighbouring_cores_stay_together():
    assert divide([4, 5, 6, 7], 2) == [[4, 5], [6, 7]]


def test_allowed_cores_are_those_of_this_process():
    assert set(allowed_cores()) == os.sched_getaffinity(0)


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("each", [1, 2, 3, 8])
def test_a_fixed_number_of_cores_is_spread_evenly(cores, workers, each):
    if each > cores:
        return
    shares = spread(list(range(cores)), workers, each)
    assert [len(set(share)) for share in shares] == [each] * workers
    counts = [sum(core in share for share in shares) for core in range(cores)]
    assert max(counts) - min(counts) <= 1


def test_workers_are_as_far_from_each_other_as_there_are_cores():
    assert spread([0, 1, 2, 3, 4, 5, 6, 7], 2, 1) == [[0], [4]]
    assert Shares([0, 1, 2, 3], 1).of(2) == [[0], [2]]
    assert Shares([0, 1, 2, 3], None).of(2) == [[0, 1], [2, 3]]


def test_no_worker_gets_more_cores_than_there_are():
    """Whatever a request names: the launcher's event loop makes these lists."""
    assert spread([4, 5], 3, 2**31 - 1) == [[4, 5]] * 3
