"""``python -m benchmarks``: how fast the collectives are here, beside others that are measured in the same run.

Each contender has processes of its own, one a rank, which answer to the process that the user has started
(:mod:`.group`): it lets one contender at a time run (:mod:`.rounds`), while all others are blocked in a read. Our ranks
inherit a segment instead of being started by ``kungfu-run``, which could not start the peers, and all have to answer to
one process; they take the cores that ``kungfu-run`` would give them. Only `resize` measures the launcher, and uses it.

No part of the package: it runs in a checkout, with whatever ms_kungfu is installed.
"""
