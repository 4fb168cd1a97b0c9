import os

import pytest

from ms_kungfu.launcher.affinity import allowed_cores, divide


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


def test_neighbouring_cores_stay_together():
    assert divide([4, 5, 6, 7], 2) == [[4, 5], [6, 7]]


def test_allowed_cores_are_those_of_this_process():
    assert set(allowed_cores()) == os.sched_getaffinity(0)
