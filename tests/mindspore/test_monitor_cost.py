"""What monitoring costs a training."""

import re

import pytest


@pytest.mark.timing
def test_monitoring_takes_at_most_3_percent_of_a_lenet_step(run_workers):
    # CPU time against CPU time; three tries, because the machine has others to serve. ResNet-50's share, of which 1 %
    # is allowed, is measured by the same program by hand: it takes minutes to compile.
    shares = []
    while not shares or (min(shares) > 0.03 and len(shares) < 3):
        output = run_workers("monitor_cost.py", 2, "lenet", "25")
        shares.append(max(float(share) for share in re.findall(r"share (\S+)", output)))
    assert min(shares) <= 0.03, shares
