"""``python -m benchmarks``: measure the collectives, together with other libraries in the same run.

Each baseline has its own processes, one per rank. The *main process*, which the user starts, controls these processes
(:mod:`.group`). It lets one baseline run at a time (:mod:`.rounds`), while all others are blocked in a read.
``kungfu-run`` can't be used for this, because it couldn't start the ranks of other libraries. So ms_kungfu's ranks
inherit a shared-memory segment, and use the cores that ``kungfu-run`` would assign. Only the benchmarks that measure a
whole job use ``kungfu-run``.

The benchmarks aren't part of the package: they run in a checkout, with any installed ms_kungfu.
"""
