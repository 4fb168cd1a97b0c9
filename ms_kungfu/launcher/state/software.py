"""Check that all workers of a job use the same versions of ms_kungfu and MindSpore. Pure.

Hosts are compared when they register (registration.py), and workers when they request their first slot. A package may
be replaced while a job runs. Without this check, a new worker could use another protocol, or kernels that round
differently.
"""

from __future__ import annotations

from dataclasses import dataclass

from ms_kungfu._version import VERSION
from ms_kungfu.launcher.wire.messages import Software


@dataclass
class JobsSoftware:
    """The versions of the launcher, and the MindSpore version of the first worker that has MindSpore.

    The program may run in another Python than the launcher.
    """

    version: str = VERSION
    mindspore: str = ""
    first: str = ""

    def objection_to(self, where: str, said: Software | None) -> str:
        """Return why the joining worker `where` can't take part, given its versions in `said`; "" if it can.

        The job adopts the worker's MindSpore version if it has none yet.
        """
        version, mindspore = ("of an unknown version", "") if said is None else (said.ms_kungfu, said.mindspore)
        if version != self.version:
            return (
                f"ms_kungfu is {version} in {where}, but {self.version} in its launcher; all processes of a job "
                f"require the "
                "same version: restart the job after an installation"
            )
        # A worker without MindSpore reports no version. If MindSpore lacks metadata, its version is known only after
        # the import.
        if mindspore and self.mindspore and mindspore != self.mindspore:
            return (
                f"MindSpore is {mindspore} in {where}, but {self.mindspore} in {self.first}; all workers of a job "
                f"require the "
                "same version: restart the job after an installation"
            )
        if mindspore and not self.mindspore:
            self.mindspore, self.first = mindspore, where
        return ""
