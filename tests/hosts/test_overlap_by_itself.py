"""Reductions that overlap the backward pass by themselves, as they do over several hosts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.hosts.namespaces import PORT

PROGRAM = Path(__file__).with_name("programs") / "overlapping.py"


@pytest.mark.long
@pytest.mark.alone  # MindSpore's threads spin: beside another test's it takes minutes
@pytest.mark.timeout(600)
def test_joining_workers_overlap_like_the_first_workers(jobs, network):
    pytest.importorskip("mindspore")
    hosts = network(2).hosts
    listed = ",".join(f"{host.address}:2" for host in hosts)
    url = f"http://{hosts[0].address}:{PORT}/config"
    words = ["-np", 3, "-H", listed, "-w", "-config-server", url, "-builtin-config-port", PORT]
    words += [sys.executable, PROGRAM, "4:4,9:2", 14]
    launchers = [jobs.start(host, "ms_kungfu.launcher", *words) for host in hosts]
    for launcher in launchers:
        launcher.assert_exit(0, 400)
    output = "\n".join(launcher.output for launcher in launchers)
    ends = re.findall(r"^overlapped (\w+) in version (\d) weights (\d+)$", output, re.MULTILINE)
    last = [(overlapped, weights) for overlapped, version, weights in ends if version == "2"]
    assert len(last) == 2, output
    assert len({*last}) == 1, output
    assert {overlapped for overlapped, _, _ in ends} == {"True"}, output
