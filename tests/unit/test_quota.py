"""The quota of the control groups, in cores."""

from __future__ import annotations

import pytest

from ms_kungfu.launcher import affinity
from ms_kungfu.launcher.quota import cpu_quota, within_quota


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "/proc/self/cgroup": "0::/a\n",
                "/sys/fs/cgroup/a/cpu.max": "300000 100000",
                "/sys/fs/cgroup/cpu.max": "150000 100000",
            },
            1.5,
        ),
        # Version 1; the container sees its own group as the root.
        (
            {
                "/proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/docker/3f\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            4.0,
        ),
        (
            {
                "/proc/self/cgroup": "1:cpu:/\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"/proc/self/cgroup": "nonsense\n0::/a\n", "/sys/fs/cgroup/a/cpu.max": "what is this"}, None),
    ],
)
def test_quota_is_the_smallest_on_the_way_to_the_root(files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(files.get) == quota


@pytest.mark.parametrize(
    ("cores", "quota", "expected"), [(8, None, 8), (8, 2.0, 2), (8, 2.1, 3), (8, 0.2, 1), (2, 16.0, 2)]
)
def test_quota_is_rounded_up_to_whole_cores(cores, quota, expected, monkeypatch) -> None:
    assert within_quota(cores, quota) == expected
    monkeypatch.setattr(affinity, "allowed_cores", lambda: list(range(cores)))
    monkeypatch.setattr(affinity, "cpu_quota", lambda: quota)
    assert affinity.core_count() == expected
