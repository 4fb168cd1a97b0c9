"""Children of workers ask for rank and size, and for a collective: children.py spawn|fork [early].

With `early` the children ask before their workers do. Without, they ask again after a resize.
"""

import multiprocessing
import re
import subprocess
import sys

import numpy as np

import ms_kungfu as kf


def numbers():
    return [
        kf.current_rank(), kf.current_cluster_size(), kf.current_local_rank(), kf.current_local_size(),
        kf.cluster_version(),
    ]  # fmt: skip


def answer(_):
    found = numbers()
    for communicate in (lambda: kf.comm.all_reduce(np.ones(1)), kf.run_barrier, lambda: kf.resize(1)):
        try:
            communicate()
        except ValueError as error:
            assert re.search("(no|not a) member of the cluster", str(error)), error
        else:
            raise AssertionError("the child took part")
    assert numbers() == found, (numbers(), found)
    return found


def ask_early(_):
    return numbers()


def main():
    manner, early = sys.argv[1], "early" in sys.argv
    context = multiprocessing.get_context(manner)
    with context.Pool(1) as pool:
        answers = pool.map(ask_early if early else answer, range(2))
        assert answers == [numbers()] * 2, (answers, numbers())
    if not early:
        assert kf.resize(1) == (True, kf.current_rank() != 0 or kf.detached())
        if kf.detached():
            return
        with context.Pool(1) as pool:
            assert pool.map(answer, range(1)) == [numbers()] == [[0, 1, 0, 1, 1]]
    asks = "import ms_kungfu as kf; kf.init(); print(kf.current_rank(), kf.current_cluster_size())"
    told = subprocess.run([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert told.split() == [str(each) for each in numbers()[:2]], told
    assert kf.comm.all_reduce(np.ones(1)) == [kf.current_cluster_size()]
    print("fine", flush=True)


if __name__ == "__main__":
    if "early" not in sys.argv:
        kf.init()
    main()
