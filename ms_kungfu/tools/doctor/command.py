"""Run the command ``python -m ms_kungfu.doctor``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Callable

from ms_kungfu._processes import printing
from ms_kungfu.tools.doctor import devices, machine, software
from ms_kungfu.tools.doctor.finding import Finding, Status, wrong
from ms_kungfu.tools.doctor.system import System

Check = Callable[[System], Iterable[Finding]]
CHECKS: tuple[tuple[str, Check], ...] = (
    ("Python", software.check_python),
    ("ms_kungfu", software.check_runtime),
    ("MindSpore", software.check_mindspore),
    ("kernels", software.check_kernels),
    ("requirements", software.check_required),
    ("CPU", machine.check_cpu),
    ("convolutions", machine.check_convolutions),
    ("cores", machine.check_cores),
    ("shared memory", machine.check_shared_memory),
    ("huge pages", machine.check_huge_pages),
    ("limits", machine.check_limits),
    ("GPU", devices.check_gpu),
    ("CUDA", devices.check_mindspore_gpu),
    ("NCCL", devices.check_nccl),
    ("Ascend", devices.check_ascend),
    ("CANN", devices.check_cann),
    ("HCCL", devices.check_hccl),
    ("devices", devices.check_settings),
    ("extras", software.check_extras),
)


def examine(system: System, checks: Iterable[tuple[str, Check]] = CHECKS) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. If a check raises an exception, this is a finding, too."""
    for topic, check in checks:
        try:
            yield from check(system)
        except ModuleNotFoundError as error:
            yield wrong(topic, f"can't be checked: {error}", f"pip install {error.name}")
        except Exception as error:
            yield wrong(topic, f"can't be checked: {type(error).__name__}: {error}", "please report this")


def main(arguments: Sequence[str] | None = None, system: System | None = None) -> int:
    """Run the command. Return the exit status: 0 if there are no problems, 1 if there are problems.

    The exit status is 2 if the command line is invalid.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ms_kungfu.doctor",
        description="Shows what is installed and what a job would use. ok: the item works; missing: it isn't "
        "installed, but everything else works without it; wrong: it must be repaired. A line with -> gives the remedy.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    as_json = parser.parse_args(arguments).json
    findings = []
    with printing(parser.prog):
        for finding in examine(system or System()):
            findings.append(finding)
            if not as_json:
                print(f"{finding.status.value:8} {finding.topic:14} {finding.found}", flush=True)
                if finding.remedy:
                    print(f"{'':8} {'':14} -> {finding.remedy}", flush=True)
        if as_json:
            print(_to_json(findings), flush=True)
    return 0 if _is_good(findings) else 1


def _is_good(findings: Iterable[Finding]) -> bool:
    return all(finding.status is not Status.WRONG for finding in findings)


def _to_json(findings: Sequence[Finding]) -> str:
    listed = [{**vars(f), "status": f.status.value, "remedy": f.remedy or None} for f in findings]
    return json.dumps({"ok": _is_good(findings), "findings": listed}, indent=2)
