"""The LeNet example over several hosts, as one types it on each of them."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.namespaces import PORT

EXAMPLE = Path(__file__).parents[2] / "examples" / "lenet-elastic"


@pytest.mark.long
@pytest.mark.alone  # MindSpore's threads spin: beside another test's it takes minutes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 4])
def test_lenet_grows_over_hosts_and_shrinks_with_each_sample_once(count, jobs, network, tmp_path):
    for module in ("mindspore", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(module)
    hosts = network(count).hosts
    listed = ",".join(f"{host.address}:2" for host in hosts)
    url = f"http://{hosts[0].address}:{PORT}/config"
    ledger = tmp_path / "ledger"  # of a disk that the hosts share
    words = ["-np", 1, "-H", listed, "-w", "-config-server", url, "-builtin-config-port", PORT]
    words += [sys.executable, EXAMPLE / "train.py", "--epochs", 3, "--schedule", "20:4,90:2"]
    words += ["--ledger", ledger, "--out", tmp_path / "out"]
    launchers = [jobs.start(host, "ms_kungfu.launcher", *words) for host in hosts]
    for launcher in launchers:
        launcher.assert_exit(0, 600)
        launcher.assert_gone(time.monotonic(), within=5)
    output = "\n".join(launcher.output for launcher in launchers)
    accuracy = re.findall(r"^test accuracy (\d\.\d{4})$", output, re.MULTILINE)
    assert len(accuracy) == 1, output
    assert float(accuracy[0]) >= 0.8
    audit = jobs.start(hosts[0], "ms_kungfu.dataset.audit", ledger)
    audit.assert_exit(0, 60)
    assert "ledger of 4 workers in 1 job" in audit.output
    assert "exact: each sample was trained once" in audit.output
