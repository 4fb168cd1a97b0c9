"""A real Slurm of two nodes on this machine: a controller and two slurmd, in namespaces of their own.

Network, mounts and processes are theirs: addresses and /etc/hosts are not the machine's, and all that they have started
ends with the first process there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

NODES = ("n1", "n2")
_CONFIGURATION = """
ClusterName=kungfu
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=10.78.0.1 Port=16821 CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=10.78.0.2 Port=16822 CPUs=4
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n[1-2] PriorityTier=2 PreemptMode=OFF
"""
_START = """
set -e
cd "$0"
ip link set lo up
ip addr add 10.78.0.1/32 dev lo
ip addr add 10.78.0.2/32 dev lo
printf '127.0.0.1 localhost %s\\n10.78.0.1 n1\\n10.78.0.2 n2\\n' "$(hostname)" >hosts
mount --bind hosts /etc/hosts
munged --force --foreground --key-file="$0/munge.key" --socket="$0/munge.socket" --pid-file="$0/munge.pid" \
  --log-file="$0/munge.log" --seed-file="$0/munge.seed" &
while [ ! -S munge.socket ]; do sleep 0.05; done
slurmctld -D &
slurmd -D -N n1 &
slurmd -D -N n2 &
wait
"""


def why_not() -> str | None:
    """Why there can be no such Slurm here."""
    if os.geteuid() != 0:
        return "a Slurm of the tests' own needs root"
    missing = [each for each in ("munged", "slurmctld", "slurmd", "srun", "ip", "unshare") if not shutil.which(each)]
    if missing:
        return f"{', '.join(missing)} not installed (tests/engines/run.sh installs them)"
    done = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"namespaces are not allowed here: {done.stderr.strip()}"


class Slurm:
    """Runs from the start to `close`, which leaves nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "state").mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(host=os.uname().nodename, folder=folder))
        (folder / "run").mkdir(mode=0o700)
        # A job's secret lies there by the job's URL, and the Slurm of a test beside this one has the same URLs.
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "XDG_RUNTIME_DIR": str(folder / "run")}
        with (folder / "daemons.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL",  # the process that started it may be killed
                 "unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", _START,
                 str(folder)], env={**os.environ, **self.environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.wait_until_idle()

    def within(self) -> list[str]:
        """The words before a command that is to run there."""
        parent = self._process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return ["nsenter", "-t", children[0], "--net", "--mount", "--pid"] if children else ["false"]

    def run(self, *words: object, check: bool = True) -> str:
        """What a command prints."""
        done = subprocess.run(
            [*self.within(), *map(str, words)], env={**os.environ, **self.environment}, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def wait_until_idle(self) -> None:
        """Until both nodes are there and have nothing to do."""
        deadline = time.monotonic() + 90
        while self.run("sinfo", "-h", "-p", "low", "-o", "%t %D", check=False).split() != ["idle", "2"]:
            assert time.monotonic() < deadline, (self._folder / "daemons.log").read_text()[-3000:]
            time.sleep(0.1)

    def cancel_all(self) -> None:
        """Ends all jobs, and waits until they have left their nodes."""
        self.run("scancel", "--user=root")
        self.wait_until_idle()

    def close(self) -> None:
        self._process.kill()  # and with it all processes there
        self._process.wait()
