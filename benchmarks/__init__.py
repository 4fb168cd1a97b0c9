"""``python -m benchmarks``: measure the collectives beside other libraries' in the same run.

Each baseline has processes of its own, one a rank, which answer to the process that the user has started
(:mod:`.group`). It lets one baseline at a time run (:mod:`.rounds`), while all others are blocked in a read. All have
to answer to one process, and ``kungfu-run`` couldn't start the peers. So ms_kungfu's ranks inherit a segment, and take
the cores that ``kungfu-run`` would give them. Only `resize` measures the launcher, and uses it.

It is no part of the package: it runs in a checkout, with any installed ms_kungfu.
"""
