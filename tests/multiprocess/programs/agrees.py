"""The agreement after a step: maxima of what the ranks pass, and whether their words are equal."""

import ms_kungfu as kf
from ms_kungfu import _core

LAST = (1 << 64) - 1

kf.init()
rank, size = kf.current_rank(), kf.current_cluster_size()
for ours, theirs in ((5, 5), (0, 0), (LAST, LAST), (3, 3 | 1 << 63), (0, LAST), (1, 2)):
    word = theirs if rank == 1 else ours
    announced, requested, outcome, same = _core.agree_after_step(rank + 1, (size - rank) << 44, word)
    assert announced == _core.announced_version()
    assert (requested, outcome) == (size, size << 44)
    assert same is (size == 1 or ours == theirs), (ours, theirs)
print("fine")
