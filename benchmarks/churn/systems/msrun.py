"""MindSpore's msrun: "Dynamic cluster startup". msrun ends a job after a failure; a scheduler restarts the job.

www.mindspore.cn/tutorials/en/master/parallel/msrun_launcher.html
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.churn.systems.base import ROOT, Command, NotApplicable, System, port
from benchmarks.churn.worker import Plan


class MSRun(System):
    checkpoints = True
    packages = ("mindspore", "numpy")
    is_peer = False

    def commands(self, plan: Plan, folder: Path) -> list[Command]:
        if plan.hosts:
            raise NotApplicable("not set up over network namespaces")
        number = str(plan.workers)
        words = [str(Path(sys.executable).with_name("msrun")), "--worker_num", number, "--local_worker_num", number]
        words += ["--master_port", str(port()), "--log_dir", str(folder / "msrun"), "--join", "True"]
        program = [str(ROOT / "benchmarks/churn/programs/msrun.py"), str(folder / "plan.json")]
        return [Command("msrun", [*words, *program], {"PYTHONPATH": str(ROOT)}, again=True)]
