"""``python -m ms_kungfu.bench``: how fast the collectives are here, beside others that are measured in the same run.

Each contender has processes of its own, one a rank, which answer to the process that the user has started
(:mod:`.group`): it lets one contender at a time run (:mod:`.rounds`), while all others are blocked in a read. The ranks are
forked with a segment rather than started by ``kungfu-run``, since ``kungfu-run`` could not start the peers, and all have
to answer to one process; only `resize` measures the launcher itself and therefore uses it.

Nothing here is imported by the rest of the package.
"""
