"""The versions of ms_kungfu and MindSpore that a job uses, and why a worker with others can't join. Pure.

Hosts are compared when they register (registration.py), each worker when it requests its first slot. A package that is
installed anew while a job runs would otherwise bring workers into it that speak another protocol, or whose kernels
compute other bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ms_kungfu._version import VERSION
from ms_kungfu.launcher.wire.messages import Software


@dataclass
class JobsSoftware:
    """The versions of the launcher, and the MindSpore of the first worker that has one.

    The program's Python may be another than the launcher's.
    """

    version: str = VERSION
    mindspore: str = ""
    first: str = ""

    def objection_to(self, where: str, said: Software | None) -> str:
        """Return why joining worker `where` can't take part, from the versions that it reports; "" if it can.

        The job adopts its MindSpore if it has none yet.
        """
        version, mindspore = ("of an unknown version", "") if said is None else (said.ms_kungfu, said.mindspore)
        if version != self.version:
            return (
                f"ms_kungfu is {version} at {where}, {self.version} at its launcher; all of a job need the same: start "
                "the job anew after an installation"
            )
        # A worker without MindSpore reports none; if MindSpore has no metadata its version is known only after the
        # import.
        if mindspore and self.mindspore and mindspore != self.mindspore:
            return (
                f"MindSpore is {mindspore} at {where}, {self.mindspore} at {self.first}; all workers of a job need the "
                "same: start the job anew after an installation"
            )
        if mindspore and not self.mindspore:
            self.mindspore, self.first = mindspore, where
        return ""
