"""More ranks than a machine has cores for: 64 of them on eight hosts."""

from __future__ import annotations

import pytest


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_64_ranks_form_reduce_shrink_grow_and_end(jobs, network):
    job = jobs.over(network(8), 64, slots=8)
    first = job.in_version(0, 64, timeout=240)
    assert sorted(host for host, _ in first.values()) == [rank // 8 for rank in range(64)]
    job.command(3, "resize", 24).assert_exit(0, 60)
    shrunk = job.in_version(1, 24, timeout=120)
    assert set(shrunk.values()) <= set(first.values())
    job.command(0, "resize", 40).assert_exit(0, 60)
    grown = job.in_version(2, 40, timeout=240)
    assert set(grown.values()) >= set(shrunk.values())
    assert len(job.finish()) == 40
