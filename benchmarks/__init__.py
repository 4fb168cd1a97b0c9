"""``python -m benchmarks``: measure the collectives, together with other libraries in the same run.

Each baseline has its own processes, one per rank, which the process that the user has started controls
(:mod:`.group`). That process lets one baseline run at a time (:mod:`.rounds`), while all others are blocked in a read.
``kungfu-run`` can't be used for this, because it couldn't start the peers. So ms_kungfu's ranks inherit a segment, and
use the cores that ``kungfu-run`` would assign. Only `resize` measures the launcher, and uses it.

This isn't part of the package: it runs in a checkout, with any installed ms_kungfu.
"""
